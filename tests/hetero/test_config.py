"""hetero/config: what users set is checked when they set it, by name and with a fix."""

import dataclasses
import errno
import json
import re

import pytest
import torch

from hetero.chunks.dtypes import Dtypes, check_dtype, default_dtype
from hetero.config import Config
from hetero.debug import DebugOptions
from offload.errors import StoreError
from offload.memory.tiers import Tier


def test_the_defaults_are_valid():
    config = Config()
    assert config.placement_policy == "auto"
    assert config.dtypes == Dtypes("bf16", "bf16")
    assert all(config.budget(tier) is None for tier in Tier)


def test_sizes_become_bytes(tmp_path):
    config = Config(
        host_memory="4GiB", device_memory=5000, nvme_capacity="1.5g", nvme_path=str(tmp_path)
    )
    assert (config.host_memory, config.device_memory) == (4 << 30, 5000)
    assert config.budget(Tier.HOST) == 4 << 30
    assert config.budget(Tier.DEVICE) == 5000
    assert config.budget(Tier.DISK) == 3 << 29


@pytest.mark.parametrize("option", ["host_memory", "device_memory", "nvme_capacity"])
@pytest.mark.parametrize("bad", ["4 apples", "", "-1g", 0, -5, 1.5, True])
def test_bad_sizes_name_the_option(option, bad):
    with pytest.raises(ValueError, match=f"^{option}: ") as refusal:
        Config.make(**{option: bad})
    assert repr(bad) in str(refusal.value)


@pytest.mark.parametrize(
    ("option", "bad", "nearest"),
    [
        ("placement_policy", "gpu", "cpu"),
        ("placement_policy", "NVME", ""),
        ("placement_policy", "nvm", "nvme"),
        ("placement_policy", None, ""),
        ("placement_policy", ["cpu"], "cpu"),
        ("io_engine", "iouring", "io_uring"),
        ("io_engine", "thread", "threads"),
        ("io_engine", None, ""),
    ],
)
def test_bad_choices_list_the_good_ones(option, bad, nearest):
    with pytest.raises(ValueError, match=f"{option} must be one of ") as refusal:
        Config.make(**{option: bad})
    message = str(refusal.value)
    assert repr(bad) in message
    assert "auto" in message
    if nearest:
        assert f"did you mean {nearest!r}" in message


@pytest.mark.parametrize("option", ["dtype", "grad_dtype"])
@pytest.mark.parametrize("bad", ["fp8", "float64", torch.float64, torch.int8, "", 16])
def test_bad_dtypes_list_the_good_ones(option, bad):
    with pytest.raises(ValueError, match=f"{option} must be one of bf16, fp16, fp32") as refusal:
        Config.make(**{option: bad})
    assert repr(bad) in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        (torch.bfloat16, "bf16"),
        ("torch.float16", "fp16"),
        ("half", "fp16"),
        (torch.float32, "fp32"),
    ],
)
def test_dtypes_have_several_names(given, name):
    assert check_dtype(given, "dtype") == name
    assert Config(dtype=given).dtypes == Dtypes(name, name)
    assert Config(dtype="fp32", grad_dtype=given).dtypes == Dtypes("fp32", name)


def test_no_dtype_is_the_machine_s():
    assert Config(dtype=None).dtype == default_dtype()


def test_no_loss_scale_leaves_scaling_to_the_user():
    assert Config(initial_loss_scale=None).initial_loss_scale is None


def test_the_bytes_of_each_payload():
    per_element = {
        name: (d.param_bytes, d.grad_bytes, d.optim_state_bytes(4096) / 4096)
        for name in ("bf16", "fp16", "fp32")
        for d in [Dtypes(name, name)]
    }
    assert per_element == {"bf16": (2, 2, 10), "fp16": (2, 2, 12), "fp32": (4, 4, 8)}


@pytest.mark.parametrize("bad", [0, -4096, 1, 5000])
def test_bad_chunk_sizes_come_with_one_that_works(bad):
    with pytest.raises(ValueError, match="chunk_numel") as refusal:
        Config(chunk_numel=bad)
    Config(chunk_numel=int(re.search(r"try (\d+)", str(refusal.value))[1]))


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("chunk_numel", "4096"),
        ("chunk_numel", "big"),
        ("chunk_numel", 4096.0),
        ("chunk_numel", True),
        ("initial_loss_scale", 0),
        ("initial_loss_scale", -1.0),
        ("initial_loss_scale", 0.5),
        ("initial_loss_scale", float("nan")),
        ("initial_loss_scale", float("inf")),
        ("initial_loss_scale", "dynamic"),
        ("loss_scale_window", 0),
        ("loss_scale_window", -1),
        ("loss_scale_window", 2.5),
        ("loss_scale_window", "2000"),
        ("prefetch", "no"),
        ("prefetch", "false"),
        ("prefetch", None),
        ("nvme_path", 5),
        ("nvme_path", []),
        ("nvme_path", ["a", 5]),
    ],
)
def test_other_bad_values_are_refused_by_name(option, bad):
    with pytest.raises(ValueError, match=option) as refusal:
        Config.make(**{option: bad})
    assert str(bad) in str(refusal.value)


def test_cuda_is_refused_with_what_to_use_instead():
    why = r"placement_policy='cuda'.*give backend='cuda'.*'auto', 'cpu' or 'nvme'"
    with pytest.raises(ValueError, match=why):
        Config(placement_policy="cuda")


def test_a_backend_that_is_not_there():
    with pytest.raises(ValueError, match=r"backend='cuda' needs a CUDA device.*use 'auto'"):
        Config(backend="cuda")
    assert Config(backend="auto").backend == "cpu"


def test_the_devices_memory_has_a_default_on_cuda(monkeypatch):
    monkeypatch.setattr("hetero.config.cuda_available", lambda: True)
    monkeypatch.setattr("hetero.config.default_device_bytes", lambda *_: 1234)
    config = Config(backend="auto")
    assert (config.backend, config.device_bytes) == ("cuda", 1234)
    assert Config(backend="cuda", device_memory="1KiB").device_bytes == 1024
    assert Config(backend="cpu").device_bytes is None


def test_nvme_needs_a_directory():
    with pytest.raises(ValueError, match="needs nvme_path"):
        Config(placement_policy="nvme")


def test_a_capacity_without_a_directory_is_not_silently_ignored():
    with pytest.raises(ValueError, match="nvme_capacity.*nvme_path"):
        Config(nvme_capacity="1GiB")


@pytest.mark.parametrize("policy", ["cpu", "auto", "nvme"])
def test_the_directory_is_checked_at_once(tmp_path, policy):
    with pytest.raises(StoreError, match="nvme_path does not exist") as refusal:
        Config(placement_policy=policy, nvme_path=tmp_path / "none")
    assert refusal.value.errno == errno.ENOENT


def test_paths_become_text(tmp_path):
    assert Config(nvme_path=tmp_path).nvme_path == str(tmp_path)


def test_several_directories(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    paths = (str(first), str(second))
    for given in ([first, second], (str(first), second), list(paths)):
        config = Config(nvme_path=given)
        assert config.nvme_path == config.nvme_paths == paths
        assert Config.make(config) == config
    assert Config(nvme_path=[first]) == Config(nvme_path=first)
    assert Config(nvme_path=first).nvme_paths == (str(first),)
    assert Config().nvme_paths == ()
    # They share a filesystem, whose space is there once.
    alone, both = Config(nvme_path=first).disk_bytes(), Config(nvme_path=paths).disk_bytes()
    assert both < 1.5 * alone


def test_directories_from_json(tmp_path):
    (tmp_path / "a").mkdir()
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"nvme_path": [str(tmp_path), str(tmp_path / "a")]}))
    assert Config.make(file).nvme_paths == (str(tmp_path), str(tmp_path / "a"))


def test_a_directory_given_twice_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="one directory twice"):
        Config(nvme_path=[tmp_path, tmp_path / "link"])


def test_a_config_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().durable = True
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().debugging.prefetch = False


class TestMake:
    def test_from_nothing_a_mapping_a_config_and_keywords(self):
        assert Config.make() == Config()
        assert Config.make({"placement_policy": "cpu"}) == Config(placement_policy="cpu")
        assert Config.make(placement_policy="cpu") == Config(placement_policy="cpu")
        config = Config(placement_policy="cpu", host_memory="1g", dtype="fp32")
        assert Config.make(config) == config
        assert Config.make(config, host_memory="2g") == dataclasses.replace(
            config, host_memory=2 << 30
        )

    def test_from_a_json_file(self, tmp_path):
        path = tmp_path / "config.json"
        path.write_text('{"tensor_placement_policy": "cpu", "host_memory": "1g"}')
        assert Config.make(path) == Config(placement_policy="cpu", host_memory=1 << 30)
        assert Config.make(str(path), host_memory=5).host_memory == 5

    @pytest.mark.parametrize("content", [None, "", "{", "[]", "3", "null"])
    def test_from_a_file_that_is_none(self, tmp_path, content):
        path = tmp_path / "config.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            Config.make(path)

    def test_keywords_win_over_a_mapping(self):
        made = Config.make({"host_memory": "1g", "prefetch": False}, host_memory="2g")
        assert (made.host_memory, made.debugging.prefetch) == (2 << 30, False)

    def test_options_for_debugging_are_apart(self):
        wanted = Config(debug=DebugOptions(prefetch=False, io_engine="threads"))
        assert wanted == Config(debug={"prefetch": False, "io_engine": "threads"})
        assert wanted == Config.make(debug={"prefetch": False}, io_engine="threads")
        assert wanted == Config.make(Config(debug={"prefetch": False}), io_engine="threads")
        assert Config.make(wanted) == dataclasses.replace(wanted) == wanted
        assert Config.make(wanted, prefetch=True).debugging == DebugOptions(io_engine="threads")
        with pytest.raises(ValueError, match="unknown option 'prefetsh'; did you mean prefetch"):
            Config(debug={"prefetsh": False})
        with pytest.raises(ValueError, match="io_engine must be one of"):
            Config(debug={"io_engine": "slow"})

    def test_there_are_fewer_options_than_before(self):
        """33 in 0.1; what no training needs is in one of them."""
        assert len(dataclasses.fields(Config)) <= 26

    def test_tensor_placement_policy_is_placement_policy(self):
        wanted = Config(placement_policy="cpu")
        assert Config.make(tensor_placement_policy="cpu") == wanted
        assert Config.make({"tensor_placement_policy": "cpu"}) == wanted
        assert Config.make(Config(), tensor_placement_policy="cpu") == wanted

    @pytest.mark.parametrize(
        ("in_mapping", "keyword"),
        [
            ("placement_policy", "tensor_placement_policy"),
            ("tensor_placement_policy", "placement_policy"),
        ],
    )
    def test_keywords_win_under_either_name(self, in_mapping, keyword):
        assert Config.make({in_mapping: "cpu"}, **{keyword: "auto"}).placement_policy == "auto"

    @pytest.mark.parametrize("policies", [("cpu", "auto"), ("auto", "cpu")])
    def test_both_names_at_once_are_refused_where_they_differ(self, policies):
        pair = dict(zip(("placement_policy", "tensor_placement_policy"), policies, strict=True))
        for make in (lambda: Config.make(pair), lambda: Config.make(**pair)):
            with pytest.raises(ValueError, match="tensor_placement_policy"):
                make()

    @pytest.mark.parametrize(
        ("unknown", "nearest"),
        [
            ("host_mem", "host_memory"),
            ("nvme_dir", "nvme_path"),
            ("placement", "placement_policy"),
            ("tensor_policy", "tensor_placement_policy"),
            ("Prefetch", "prefetch"),
        ],
    )
    def test_unknown_options_come_with_the_nearest(self, unknown, nearest):
        for make in (lambda: Config.make({unknown: 1}), lambda: Config.make(**{unknown: 1})):
            with pytest.raises(ValueError, match=f"unknown option '{unknown}'") as refusal:
                make()
            assert nearest in str(refusal.value).partition("did you mean")[2]

    def test_options_like_none_come_with_all(self):
        with pytest.raises(ValueError, match="known: ") as refusal:
            Config.make(zzz=1)
        assert all(field.name in str(refusal.value) for field in dataclasses.fields(Config))
