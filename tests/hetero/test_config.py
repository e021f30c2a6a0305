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
    assert Config(dtype=None).dtype == default_dtype()
    assert Config(initial_loss_scale=None).initial_loss_scale is None  # the user's loop scales


def test_sizes_become_bytes(tmp_path):
    config = Config(
        host_memory="4GiB", device_memory=5000, nvme_capacity="1.5g", nvme_path=str(tmp_path)
    )
    assert (config.host_memory, config.device_memory) == (4 << 30, 5000)
    assert config.budget(Tier.HOST) == 4 << 30
    assert config.budget(Tier.DEVICE) == 5000
    assert config.budget(Tier.DISK) == 3 << 29


DEBUG = [field.name for field in dataclasses.fields(DebugOptions)]
SIZES = ("host_memory", "device_memory", "nvme_capacity")
DTYPES = ("fp8", "float64", torch.float64, torch.int8, "", 16)
CHOICE = ("placement_policy must be one of .*auto", "io_engine must be one of .*auto")
# Options, what they may not be, and what is said beside the value.
REFUSED = [
    *((SIZES[n % 3], bad, rf"^{SIZES[n % 3]}: ")
      for n, bad in enumerate(["4 apples", "", "-1g", 0, -5, 1.5, True])),
    ("placement_policy", "gpu", f"{CHOICE[0]}.*did you mean 'cpu'"),
    ("placement_policy", "NVME", CHOICE[0]),
    ("placement_policy", None, CHOICE[0]),
    ("placement_policy", ["cpu"], f"{CHOICE[0]}.*did you mean 'cpu'"),
    ("io_engine", "iouring", f"{CHOICE[1]}.*did you mean 'io_uring'"),
    ("io_engine", None, CHOICE[1]),
    *((("dtype", "grad_dtype")[n % 2], bad, "dtype must be one of bf16, fp16, fp32")
      for n, bad in enumerate(DTYPES)),
    *(("chunk_numel", bad, "chunk_numel") for bad in ("4096", "big", 4096.0, True)),
    *(("initial_loss_scale", bad, "initial_loss_scale")
      for bad in (0, -1.0, 0.5, float("nan"), float("inf"), "dynamic")),
    *(("loss_scale_window", bad, "loss_scale_window") for bad in (0, -1, 2.5, "2000")),
    *(("prefetch", bad, "prefetch") for bad in ("no", "false", None)),
    *(("nvme_path", bad, "nvme_path") for bad in (5, [], ["a", 5], "", ["a", ""])),
    ("zero_stage", "3", "zero_stage must be one of 1, 2, 3, not '3'; did you mean 3\\?"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "bad", "match"), REFUSED)
def test_bad_values_are_refused_by_name(option, bad, match):
    with pytest.raises(ValueError, match=match) as refusal:
        Config.make({"debug": {option: bad}} if option in DEBUG else {option: bad})
    assert repr(bad) in str(refusal.value) or str(bad) in str(refusal.value)


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


def test_a_device_that_is_not_there():
    why = r"placement_policy='cuda'.*give backend='cuda'.*'auto', 'cpu' or 'nvme'"
    with pytest.raises(ValueError, match=why):
        Config(placement_policy="cuda")
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


def test_a_missing_directory(tmp_path):
    with pytest.raises(ValueError, match="needs nvme_path"):
        Config(placement_policy="nvme")
    with pytest.raises(ValueError, match="nvme_capacity.*nvme_path"):
        Config(nvme_capacity="1GiB")  # else it would be silently ignored
    for policy in ("cpu", "auto", "nvme"):
        with pytest.raises(StoreError, match="nvme_path does not exist") as refusal:
            Config(placement_policy=policy, nvme_path=tmp_path / "none")
        assert refusal.value.errno == errno.ENOENT


def test_several_directories(tmp_path):
    assert Config(nvme_path=tmp_path).nvme_path == str(tmp_path)
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
        given = {"tensor_placement_policy": "cpu", "host_memory": "1g"}
        path.write_text(json.dumps({**given, "nvme_path": [str(tmp_path)]}))
        wanted = Config(placement_policy="cpu", host_memory=1 << 30, nvme_path=tmp_path)
        assert Config.make(path) == wanted
        assert Config.make(str(path), host_memory=5).host_memory == 5

    @pytest.mark.parametrize("content", [None, "", "{", "[]", "3", "null"])
    def test_from_a_file_that_is_none(self, tmp_path, content):
        path = tmp_path / "config.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            Config.make(path)

    def test_keywords_win_over_a_mapping(self):
        made = Config.make({"host_memory": "1g", "verify_reads": True}, host_memory="2g")
        assert (made.host_memory, made.verify_reads) == (2 << 30, True)

    def test_options_for_debugging_are_apart(self):
        wanted = Config(debug=DebugOptions(prefetch=False, io_engine="threads"))
        assert wanted == Config(debug={"prefetch": False, "io_engine": "threads"})
        assert Config.make(wanted) == dataclasses.replace(wanted) == wanted
        for given in (wanted, {"debug": wanted.debug}, {"debug": vars(wanted.debug)}):
            made = Config.make(given, debug={"prefetch": True})
            assert made.debugging == DebugOptions(io_engine="threads")
            assert Config.make(given, debug=DebugOptions()) == Config()
        with pytest.raises(ValueError, match="unknown option 'prefetsh'; did you mean prefetch"):
            Config(debug={"prefetsh": False})
        with pytest.raises(ValueError, match="io_engine must be one of"):
            Config(debug={"io_engine": "slow"})
        with pytest.raises(ValueError, match="debug must be .*, not 'prefetch'"):
            Config(debug="prefetch")

    @pytest.mark.parametrize("name", DEBUG)
    def test_an_option_for_debugging_has_one_place(self, name):
        for make in (lambda: Config.make({name: 1}), lambda: Config.make(**{name: 1})):
            with pytest.raises(
                ValueError, match=rf"{name} is an option of debug; .*{{'{name}': 1}}"
            ):
                make()

    def test_what_is_no_set_of_options_is_refused(self):
        with pytest.raises(ValueError, match="options are a mapping, .*, not 5"):
            Config.make(5)

    def test_there_are_fewer_options_than_before(self):
        """33 in 0.1; what no training needs is in one of them."""
        assert len(dataclasses.fields(Config)) <= 26

    def test_tensor_placement_policy_is_placement_policy(self):
        wanted = Config(placement_policy="cpu")
        assert Config.make(tensor_placement_policy="cpu") == wanted
        assert Config.make({"tensor_placement_policy": "cpu"}) == wanted
        assert Config.make(Config(), tensor_placement_policy="cpu") == wanted

    def test_keywords_win_under_either_name(self):
        names = ["placement_policy", "tensor_placement_policy"]
        for in_mapping, keyword in (names, names[::-1]):
            made = Config.make({in_mapping: "cpu"}, **{keyword: "auto"})
            assert made.placement_policy == "auto"

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
            ("Verify_reads", "verify_reads"),
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
