"""offload/profile/measure: a whole profile comes of it, and nothing is left behind."""

import os

import pytest

from offload.errors import StoreError
from offload.profile import measure
from offload.profile.machine_profile import Profile
from offload.profile.measure import measure_profile


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(measure, "SHAPES", ((64, 64, 64),))


def small(*paths, tell=lambda text: None) -> Profile:
    return measure_profile(
        [os.fspath(p) for p in paths], tell=tell, numel=4096, area_bytes=1 << 24, window_s=0.01
    )


def test_every_rate_is_there_and_the_profile_survives_a_file(tmp_path):
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


def test_without_a_directory_there_is_no_disk():
    found = small()
    assert found.nvme_read_bytes_per_s is found.nvme_bytes is None


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StoreError, match="gone"):
        small(tmp_path / "gone")
