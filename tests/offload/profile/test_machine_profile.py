"""offload/profile: what is measured and saved is what is loaded, and nothing else is accepted."""

import dataclasses
import itertools
import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import StoreError
from offload.profile import measure
from offload.profile.machine_profile import Profile, default_path
from offload.profile.measure import measure_profile
from tests.support.training.planning import separate_profile

RATES = {"bf16": 2e9, "fp32": 1e9}


def profile(**changes) -> Profile:
    """Of a machine with several GPUs."""
    rates = {"devices": 4, "update_bytes_per_s": RATES, "matmul_flop_per_s": RATES}
    return separate_profile(**{**rates, **changes})


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "some" / "folder" / "profile.json"
    profile().save(path)
    assert Profile.load(path) == profile()
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


def test_a_file_without_latencies_is_loaded(tmp_path):
    """Those that were saved before profiles had any."""
    path = tmp_path / "profile.json"
    content = profile().as_dict()
    del content["rank_latency_s"], content["node_latency_s"]
    path.write_text(json.dumps(content))
    assert Profile.load(path) == profile()
    whole = profile(rank_latency_s=1e-6, node_latency_s=5e-6)
    assert whole.share(8).node_latency_s == 5e-6


NUMBERS = [f.name for f in dataclasses.fields(Profile) if f.name not in ("name", "date", "source")]


def test_numbers_that_make_no_sense_are_refused():
    tables = ("update_bytes_per_s", "device_update_bytes_per_s", "matmul_flop_per_s")
    for name, value in itertools.product(NUMBERS, (0, -1, math.nan, math.inf, "fast", True, [1])):
        with pytest.raises(ValueError, match=name):
            profile(**{name: value})
        if name in tables:
            with pytest.raises(ValueError, match=rf"{name}\['bf16'\]"):
                profile(**{name: {"bf16": value}})


def test_a_disk_and_a_device_are_known_whole_or_not_at_all():
    of_disk, of_device = "nvme_mixed_bytes_per_s", ("d2h_bytes_per_s", "device_bytes")
    for missing in (of_disk, *of_device, "h2d_bytes_per_s"):
        with pytest.raises(ValueError, match=f"{missing} is not"):
            profile(**{missing: None})


@given(st.integers(1, 64))
def test_ranks_share_the_machine_and_not_their_devices(ranks):
    whole = profile()
    mine = whole.share(ranks)
    each_device = math.ceil(ranks / whole.devices)
    assert mine.nvme_read_bytes_per_s == whole.nvme_read_bytes_per_s / ranks
    assert mine.update_bytes_per_s["bf16"] == RATES["bf16"] / ranks
    assert mine.host_bytes == whole.host_bytes // ranks
    assert mine.h2d_bytes_per_s == whole.h2d_bytes_per_s / each_device
    assert mine.matmul_flop_per_s["fp32"] == RATES["fp32"] / each_device
    assert mine.devices == 1


def test_a_dtype_that_was_not_measured_is_named():
    with pytest.raises(ValueError, match="no matmul_flop_per_s for fp16, only for bf16, fp32"):
        profile().rate("matmul_flop_per_s", "fp16")


def test_a_file_that_is_none_is_refused_by_name(tmp_path):
    path, content = tmp_path / "bad.json", profile().as_dict()
    without = {name: value for name, value in content.items() if name != "threads"}
    for text, what in (
        ("{", "not JSON"),
        ("[]", "JSON object"),
        (json.dumps({**content, "format": 3}), "format 3"),
        (json.dumps({**content, "format": True}), "format True"),
        (json.dumps({**content, "speed": 1}), "unknown field 'speed'"),
        (json.dumps(without), "no field 'threads'"),
        (json.dumps({**content, "threads": 0}), "threads must be a positive integer, not 0"),
        (json.dumps({**content, "dram_bytes_per_s": None}), "dram_bytes_per_s must be"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match="bad.json") as refusal:
            Profile.load(path)
        assert what in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the profile .*none.json: No such file"):
        Profile.load(tmp_path / "none.json")


def test_the_default_place_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "hetero" / "profile.json"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_path() == tmp_path / "home" / ".cache" / "hetero" / "profile.json"


def small(*paths, tell=lambda text: None) -> Profile:
    return measure_profile(
        [os.fspath(p) for p in paths], tell=tell, numel=4096, area_bytes=1 << 24, window_s=0.01
    )


def test_every_rate_is_there_and_the_profile_survives_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "SHAPES", ((64, 64, 64),))
    told = []
    found = small(tmp_path, tell=told.append)
    assert found.nvme_read_bytes_per_s is not None
    assert found.nvme_bytes is not None
    assert set(found.update_bytes_per_s) == set(found.matmul_flop_per_s) == {"bf16", "fp16", "fp32"}
    assert not found.separate
    assert str(tmp_path) in " ".join(told)
    assert list(tmp_path.iterdir()) == []
    found.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == found
    without_disk = small()
    assert without_disk.nvme_read_bytes_per_s is without_disk.nvme_bytes is None
    with pytest.raises(StoreError, match="gone"):
        small(tmp_path / "gone")
