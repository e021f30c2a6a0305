"""hetero/activations/store: what autograd saved comes back with its bits, inside the budget."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hetero.activations.activation import ActivationState
from offload.device.cuda_backend import CudaBackend
from offload.errors import BudgetError, ClosedError, StaleGraphError
from offload.memory.tiers import Tier
from tests.support.activations import KIB, StoreRig, open_store, unpack, values
from tests.support.native.fake_cuda import FakeRuntime

pytestmark = pytest.mark.usefixtures("nothing_left")


def save(rig: StoreRig, count: int, nbytes: int = 16 * KIB) -> list:
    """Saves so many tensors that nobody else keeps."""
    return [rig.store.pack(values(seed, nbytes)) for seed in range(count)]


def states(saved: list) -> list[str]:
    return [each.activation.state.name for each in saved]


def test_what_fits_stays_as_it_is(tmp_path: Path) -> None:
    with open_store(tmp_path) as rig:
        saved = save(rig, 12)
        assert states(saved) == ["KEPT"] * 12
        assert rig.used() == rig.store.kept_bytes == 12 * 16 * KIB
        memory = [each.activation.tensors[each.key][0].data_ptr() for each in saved]
        assert [unpack(each).data_ptr() for each in saved] == memory
        assert rig.written == 0
        assert rig.used(Tier.DISK) == 0
        del saved
        assert rig.used() == len(rig.store) == 0


def test_the_earliest_leave_and_all_come_back(tmp_path: Path) -> None:
    """A quarter of 256 KiB is for slots: 12 of 16 KiB are kept, and of 40 the others are written,
    each once. Backward, which asks in reverse, reads all but those that are still in slots."""
    with open_store(tmp_path) as rig:
        saved = save(rig, 40)
        kept = [each.activation.state is ActivationState.KEPT for each in saved]
        assert kept == [False] * 28 + [True] * 12
        assert rig.store.kept_bytes == 12 * 16 * KIB
        assert rig.written == 28 * 16 * KIB
        seed = 39
        while saved:
            each = saved.pop()
            assert torch.equal(unpack(each), values(seed))
            seed -= 1
            del each
        assert rig.written == 28 * 16 * KIB
        assert 24 * 16 * KIB <= rig.read <= 28 * 16 * KIB
        assert rig.used() == len(rig.store) == 0


def test_a_process_that_grows_too_large_is_lent_what_can_leave(tmp_path: Path) -> None:
    """All but a part for the largest is lent at once, with 192 KiB in tensors: they leave in turn,
    none that comes is refused, and all come back."""
    excess = 0
    with open_store(tmp_path, excess=lambda soon: excess, strict=False) as rig:
        saved = save(rig, 12)
        excess = 1 << 30
        saved += save(rig, 12)
        assert rig.notes == []
        assert None not in saved
        assert rig.used() <= 64 * KIB
        for seed in reversed(range(24)):
            assert torch.equal(unpack(saved.pop()), values(seed % 12))
        assert rig.notes == []


def test_what_leaves_is_computed_whatever_stream_that_was_in() -> None:
    """Another stream has not done it yet when more is saved in this one, so that it leaves."""
    runtime, expected = FakeRuntime(), values(0)
    side, made = runtime.new_stream(), torch.zeros_like(expected)
    memory, address = StorageWeakRef(made.untyped_storage()), made.data_ptr()

    def compute() -> None:
        if not memory.expired():
            ctypes.memmove(address, expected.data_ptr(), expected.nbytes)

    with open_store(None, 256 * KIB, 128 * KIB, CudaBackend(runtime)) as rig:
        runtime.give(side, compute)
        with runtime.on(side):
            saved = [rig.store.pack(made)]
        del made
        saved += save(rig, 8)
        assert states(saved)[0] != "KEPT"
        assert torch.equal(unpack(saved[0]), expected)


def test_any_order_and_more_than_once(tmp_path: Path) -> None:
    with open_store(tmp_path) as rig:
        saved = save(rig, 40)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(3)).tolist()
        for seed in [*order, *range(40), *reversed(range(40))]:
            assert torch.equal(unpack(saved[seed]), values(seed))
        assert rig.written == 28 * 16 * KIB  # what the file has is not written again


def test_views_and_aliases_are_kept_once(tmp_path: Path) -> None:
    with open_store(tmp_path, host=64 * KIB) as rig:
        whole = values(0).view(64, 64)
        views = [whole, whole.t(), whole[8:40], whole.detach(), whole[3, 5:], whole[::2, 1::3]]
        views.append(whole.view(torch.int32))
        expected = [view.clone() for view in views]
        saved = [rig.store.pack(view) for view in views]
        assert {each.activation for each in saved} == {saved[0].activation}
        assert rig.used() == 16 * KIB
        del whole, views
        others = save(rig, 12)
        assert saved[0].activation.state is ActivationState.ON_DISK
        for each, value in zip(saved, expected, strict=True):
            found = unpack(each)
            assert torch.equal(found, value)
            assert (found.shape, found.stride()) == (each.size, each.stride)
        del others


def test_only_the_bytes_that_are_viewed_are_written(tmp_path: Path) -> None:
    with open_store(tmp_path, host=256 * KIB) as rig:
        part = values(0, 64 * KIB)[4096:6144]
        expected = part.clone()
        saved = rig.store.pack(part)
        assert rig.used() == 64 * KIB
        del part
        others = save(rig, 5)  # of the 128 KiB that are not for slots
        assert saved.activation.state is not ActivationState.KEPT
        assert rig.written == 8 * KIB
        assert torch.equal(unpack(saved), expected)
        del others


def test_dtypes(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex128]
    generator = torch.Generator().manual_seed(0)
    with open_store(tmp_path, host=256 * KIB) as rig:
        expected = [torch.randint(0, 2, (1000, 5), generator=generator).to(d) for d in dtypes]
        saved = [rig.store.pack(each.clone()) for each in expected]
        others = save(rig, 16)
        assert "KEPT" not in states(saved)
        for each, value in zip(saved, expected, strict=True):
            found = unpack(each)
            assert found.dtype is value.dtype
            assert torch.equal(found, value)
            del found
        del others


class TestWhatOthersHold:
    """It does not leave: that would free nothing."""

    def test_it_stays_and_is_not_charged(self, tmp_path: Path) -> None:
        with open_store(tmp_path) as rig:
            held = [values(seed) for seed in range(12)]
            saved = [rig.store.pack(each) for each in held]
            assert rig.used() == 12 * 16 * KIB
            others = save(rig, 12)
            assert {*states(saved), *states(others)} == {"KEPT"}
            assert rig.written == 0
            assert rig.used() == 12 * 16 * KIB
            assert unpack(saved[0]).data_ptr() == held[0].data_ptr()

    def test_it_is_charged_again_and_leaves_when_they_let_it_go(self, tmp_path: Path) -> None:
        with open_store(tmp_path) as rig:
            held = [values(seed) for seed in range(12)]
            saved = [rig.store.pack(each) for each in held]
            others = save(rig, 12)
            held.clear()
            others += save(rig, 12)
            assert "KEPT" not in states(saved)
            assert rig.used() <= 256 * KIB
            for seed, each in enumerate(saved):
                assert torch.equal(unpack(each), values(seed))

    def test_a_view_of_it_counts_and_so_does_its_storage(self, tmp_path: Path) -> None:
        with open_store(tmp_path, host=64 * KIB) as rig:
            tensor = values(0)
            saved, part = rig.store.pack(tensor), tensor[7:9]
            del tensor
            others = save(rig, 8)
            assert saved.activation.state is ActivationState.KEPT
            del part
            others += save(rig, 2)
            assert saved.activation.state is not ActivationState.KEPT
            del others

    @pytest.mark.parametrize("holds", ["numpy", "from_numpy", "storage"])
    def test_their_memory_is_not_touched(self, holds: str, tmp_path: Path) -> None:
        """What leaves has its pages discarded, at once."""
        with open_store(tmp_path, host=64 * KIB) as rig:
            tensor = values(0)
            expected = tensor.clone()
            holder: Any = tensor.numpy() if holds == "numpy" else tensor.untyped_storage()
            if holds == "from_numpy":
                holder = expected.numpy().copy()
                tensor = torch.from_numpy(holder)
            saved = rig.store.pack(tensor)
            del tensor
            others = save(rig, 8)
            if holds == "storage":
                holder = torch.empty(0).set_(holder)
            assert torch.equal(torch.as_tensor(holder), expected)
            assert torch.equal(unpack(saved), expected)
            del others

    def test_nor_is_what_backward_was_given(self, tmp_path: Path) -> None:
        """Another thread may save while an operator of backward computes with it."""
        with open_store(tmp_path) as rig:
            saved = save(rig, 12)
            given = unpack(saved[0])
            others = save(rig, 40)
            assert torch.equal(given, values(0))
            del given
            others += save(rig, 40)
            assert saved[0].activation.state is not ActivationState.KEPT
            assert torch.equal(unpack(saved[0]), values(0))
            del saved, others

    def test_parameters_and_leaves_are_left_alone(self, tmp_path: Path) -> None:
        with open_store(tmp_path) as rig:
            param = torch.nn.Parameter(values(0).view(64, 64))
            frozen = torch.nn.Parameter(values(0).view(64, 64), requires_grad=False)
            leaf = values(1).view(64, 64).requires_grad_()
            for tensor in (param, param.t(), frozen, frozen.t(), leaf):
                assert rig.store.pack(tensor) is None
            assert rig.used() == 0


class TestSmallOnes:
    """They are counted, and do not leave."""

    def test_they_stay(self, tmp_path: Path) -> None:
        with open_store(tmp_path) as rig:
            small = save(rig, 8, nbytes=2 * KIB)
            large = save(rig, 40)
            assert set(states(small)) == {"KEPT"}
            assert rig.store.kept_bytes <= 192 * KIB
            assert [torch.equal(unpack(s), values(i, 2 * KIB)) for i, s in enumerate(small)]
            del large
            assert rig.store.kept_bytes == 8 * 2 * KIB

    def test_too_many_of_them_are_an_error(self, tmp_path: Path) -> None:
        with open_store(tmp_path, host=64 * KIB) as rig:
            small = save(rig, 80, nbytes=512 - 64)
            with pytest.raises(BudgetError, match="has no room for .*activation checkpointing"):
                small += save(rig, 80, nbytes=512 - 64)
            assert rig.used() <= 64 * KIB


class TestChanges:
    """torch does not look at the version of what a hook has packed."""

    @pytest.mark.parametrize("leaves", [False, True])
    def test_a_change_after_saving_is_refused(self, leaves: bool, tmp_path: Path) -> None:
        with open_store(tmp_path, host=64 * KIB) as rig:
            tensor = values(0)
            before = rig.store.pack(tensor)
            tensor.add_(1)
            after = rig.store.pack(tensor[1:])
            expected = tensor[1:].clone()
            del tensor
            others = save(rig, 8) if leaves else []
            assert (before.activation.state is ActivationState.KEPT) != leaves
            with pytest.raises(StaleGraphError, match="modified by an inplace operation"):
                unpack(before)
            assert torch.equal(unpack(after), expected)
            del others


class TestEnds:
    """What no graph needs is free at once."""

    def test_the_garbage_collector_may_come_at_any_time(self, tmp_path: Path) -> None:
        with open_store(tmp_path) as rig:
            circle: list = save(rig, 40)
            circle.append(circle)
            del circle
            with rig.store._locked():
                gc.collect()
            assert len(rig.store) == 0

    def test_after_close(self, tmp_path: Path) -> None:
        with open_store(tmp_path) as rig:
            saved = save(rig, 40)
            rig.store.close()
            assert torch.equal(unpack(saved[39]), values(39))
            with pytest.raises(ClosedError):
                unpack(saved[0])
            assert rig.store.pack(values(0)) is None


class TestNoRoom:
    """The error says what is missing; or nothing was strict."""

    def test_too_large(self, tmp_path: Path) -> None:
        with open_store(tmp_path) as rig:
            with pytest.raises(BudgetError, match="too large for activation_memory") as refused:
                rig.store.pack(values(0, 100 * KIB))
            (least,) = re.findall(r"raise it to .*\((\d+) bytes\)", str(refused.value))
            assert rig.used() == 0
        with open_store(tmp_path, host=int(least)) as rig:
            assert rig.store.pack(values(0, 100 * KIB)) is not None

    def test_no_nvme(self) -> None:
        with open_store(None) as rig:
            saved = save(rig, 16)
            with pytest.raises(BudgetError, match="give nvme_path"):
                saved += save(rig, 1)
            assert rig.used() == 256 * KIB
            assert all(torch.equal(unpack(s), values(i)) for i, s in enumerate(saved))

    def test_nothing_is_strict(self) -> None:
        with open_store(None, strict=False) as rig:
            saved = [rig.pack(values(seed)) for seed in range(20)]
            assert rig.used() == 256 * KIB
            assert all(torch.equal(unpack(s), values(i)) for i, s in enumerate(saved))
            (note,) = rig.notes
            assert "no budget counts" in note

    def test_no_way_back(self, tmp_path: Path) -> None:
        with open_store(tmp_path) as rig:
            saved = save(rig, 40)
            held = []
            with pytest.raises(BudgetError, match="no room to bring back .*raise it"):
                held = [unpack(each) for each in saved if not held.append(unpack(each))]
            held.clear()
            assert torch.equal(unpack(saved[20]), values(20))
            assert rig.used() <= 256 * KIB
