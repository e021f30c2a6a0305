"""hetero/activations: transfers that fail lose nothing, and say what they were of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.activations.activation import ActivationState
from offload._native import NativeIoError
from offload.device.backend import EmulatedBackend
from offload.errors import BudgetError, StoreError
from offload.memory.tiers import Tier
from tests.support.activations import GENEROUS, KIB, StoreRig, open_store, unpack, values
from tests.support.native.gates import GatedTransfers

pytestmark = pytest.mark.usefixtures("nothing_left")


def gated(monkeypatch: pytest.MonkeyPatch, kind: Any = GatedTransfers) -> list[GatedTransfers]:
    """Stores have transfers of this kind, which are in the list when they are made."""
    made: list[GatedTransfers] = []

    def make(*arguments: Any) -> GatedTransfers:
        made.append(kind(*arguments))
        return made[-1]

    monkeypatch.setattr("hetero.state.memory.Transfers", make)
    return made


def save(rig: StoreRig, seeds: range) -> list[Any]:
    return [rig.store.pack(values(seed)) for seed in seeds]


def test_a_failed_read_names_the_tensor_and_can_be_tried_again(tmp_path: Path) -> None:
    with open_store(tmp_path, debug={"prefetch": False}) as rig:
        saved = save(rig, range(40))
        rig.inject("read")
        assert saved[3].activation.state is ActivationState.ON_DISK
        with pytest.raises(NativeIoError, match=r"a saved tensor of shape \(4096,\) \(16.0 KiB\)"):
            unpack(saved[3])
        assert saved[3].activation.state is ActivationState.ON_DISK
        assert torch.equal(unpack(saved[3]), values(3))


def test_a_failed_read_ahead_is_made_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as rig:
        saved = save(rig, range(40))
        rig.inject("read", nth=1, count=2)  # what is read ahead of the first one
        failures = 0
        for seed in reversed(range(27)):
            found = None
            while found is None:
                try:
                    found = unpack(saved[seed])
                except NativeIoError:  # of a read that was waited for; there are two
                    failures += 1
                    assert failures <= 2
            assert torch.equal(found, values(seed))
            del found
            saved.pop()


@pytest.mark.parametrize("count", [1, 3])
def test_a_failed_write_loses_nothing_and_is_made_again(count: int, tmp_path: Path) -> None:
    with open_store(tmp_path) as rig:
        saved = save(rig, range(13))
        rig.wait_written()
        rig.inject("write", nth=1, count=count)
        failed = []
        while len(saved) < 60:
            try:
                saved += save(rig, range(len(saved), len(saved) + 1))
            except NativeIoError as error:  # whoever waited for the room is told
                failed.append(error)
        assert len(failed) <= count
        assert all("a saved tensor of shape (4096,)" in str(error) for error in failed)
        for seed, each in enumerate(saved):
            assert torch.equal(unpack(each), values(seed))
        rig.wait_written()
        assert rig.written == (48 + count) * 16 * KIB


def test_no_space_on_nvme(tmp_path: Path) -> None:
    with open_store(tmp_path) as rig:
        rig.ledger.set_budget(Tier.DISK, 64 * KIB)
        saved: list[Any] = []
        with pytest.raises((BudgetError, StoreError), match="would pass the disk budget"):
            for seed in range(40):
                saved += save(rig, range(seed, seed + 1))
        assert len(saved) > 12
        for seed, each in enumerate(saved):
            assert torch.equal(unpack(each), values(seed))
        rig.ledger.set_budget(Tier.DISK, GENEROUS)
        saved += save(rig, range(len(saved), 40))
        for seed, each in enumerate(saved):
            assert torch.equal(unpack(each), values(seed))


@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_a_failed_copy_over_the_link(way: str, tmp_path: Path) -> None:
    backend = EmulatedBackend(1e9)
    with open_store(tmp_path, 256 * KIB, 256 * KIB, backend) as rig:
        saved = save(rig, range(8))
        getattr(backend, way).inject(0)
        with pytest.raises(OSError, match="a saved tensor of shape .*copy of 16384 bytes"):
            for seed in range(8, 30):
                saved += save(rig, range(seed, seed + 1))
            for each in reversed(saved):
                unpack(each)
        for seed, each in enumerate(saved):
            assert torch.equal(unpack(each), values(seed))


def test_ends_while_reads_are_held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is under way when its graph goes keeps slots and file until it has ended."""
    made = gated(monkeypatch)
    with open_store(tmp_path) as rig:
        saved = save(rig, range(40))
        with made[0].gate.closed():
            for _ in range(8):  # backward through some that are kept
                unpack(saved[-1])
                saved.pop()
            assert made[0].gate.held > 0
            reading = [s for s in saved if s.activation.state is ActivationState.READING]
            assert len(reading) == made[0].gate.held
            del reading
            saved.clear()
            assert len(rig.store) == 0
            saved = save(rig, range(40))
        for seed, each in enumerate(saved):
            assert torch.equal(unpack(each), values(seed))


def test_what_comes_next_is_read_ahead_in_reverse_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While the gate is closed no read begins, so its order shows what was predicted alone."""
    offsets: list[int] = []

    class Noting(GatedTransfers):
        def read(self, *arguments: Any) -> Any:
            offsets.append(arguments[2])
            return super().read(*arguments)

    made = gated(monkeypatch, Noting)
    with open_store(tmp_path) as rig:
        saved = save(rig, range(40))
        rig.wait_written()
        on_disk = [s for s in saved if s.activation.state is ActivationState.ON_DISK]
        extents = [s.activation.extent for s in on_disk]
        del on_disk
        with made[0].gate.closed():
            for _ in range(12):  # backward through those that are kept
                unpack(saved[-1])
                saved.pop()
            ahead = len(offsets)
            assert ahead > 4
            assert offsets == extents[::-1][:ahead]
            assert made[0].gate.held == ahead
        while saved:
            assert torch.equal(unpack(saved[-1]), values(len(saved) - 1))
            saved.pop()
        assert offsets == extents[::-1]  # each once, none out of turn
