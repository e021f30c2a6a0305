"""hetero/activations/store: anything that graphs may do, against copies of what they save."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.multiprocessing.reductions import StorageWeakRef

from hetero.activations.store import SavedActivation
from offload.device.backend import Backend, EmulatedBackend
from offload.device.cuda_backend import CudaBackend
from offload.errors import BudgetError, StaleGraphError
from tests.support.activations import KIB, open_store, unpack
from tests.support.native.fake_cuda import FakeRuntime

HOST = 192 * KIB
BACKENDS: dict[str, Callable[[], Backend | None]] = {
    "cpu": lambda: None,
    "emulated": lambda: EmulatedBackend(1e10),
    "cuda": lambda: CudaBackend(FakeRuntime()),
}
ANY = st.integers(0, 1 << 16)  # one of those that there are
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda tensor: tensor,
    "t": lambda tensor: tensor.t(),
    "part": lambda tensor: tensor[3:9, 2::3],
    "flat": lambda tensor: tensor.view(-1),
}


@dataclass
class Saved:
    """A saved tensor, and what it was."""

    packed: Any
    expected: torch.Tensor
    storage: StorageWeakRef  # (while there is one no other storage has the address)
    is_stale: bool = False


class StoreMachine(RuleBasedStateMachine):
    """Saves tensors and views of them, keeps some, changes some, unpacks and drops in any order."""

    backend = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.resources = ExitStack()
        self.saved: list[Saved] = []
        self.held: list[torch.Tensor] = []  # tensors that others have
        self.in_use: list[tuple[torch.Tensor, torch.Tensor]] = []  # of backward, in slots

    @initialize(prefetch=st.booleans())
    def begin(self, prefetch: bool) -> None:
        path = Path(self.resources.enter_context(tempfile.TemporaryDirectory()))
        made = BACKENDS[self.backend]()
        device = 0 if made is None else 256 * KIB
        debug = {"prefetch": prefetch}
        store = open_store(path, HOST, device, made, strict=False, debug=debug)
        self.rig = self.resources.enter_context(store)

    def teardown(self) -> None:
        self.in_use.clear()
        self.resources.close()

    def pack(self, tensor: torch.Tensor) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        self.saved.append(Saved(self.rig.pack(tensor), tensor.clone(), storage))

    @rule(kib=st.sampled_from([0.1, 1, 4, 9, 24, 40]))
    def save(self, kib: float) -> None:
        self.pack(torch.randn(int(kib * 256)))

    @rule(kib=st.sampled_from([1, 8, 24]))
    def make(self, kib: int) -> None:
        self.held.append(torch.randn(kib * 16, 16))

    @precondition(lambda self: self.held)
    @rule(which=ANY, view=st.sampled_from(sorted(VIEWS)))
    def save_held(self, which: int, view: str) -> None:
        self.pack(VIEWS[view](self.held[which % len(self.held)]))

    @precondition(lambda self: self.held)
    @rule(which=ANY)
    def let_go(self, which: int) -> None:
        del self.held[which % len(self.held)]

    @precondition(lambda self: self.held)
    @rule(which=ANY)
    def change(self, which: int) -> None:
        tensor = self.held[which % len(self.held)]
        tensor.add_(1)
        for each in self.saved:
            each.is_stale |= each.storage.cdata == tensor.untyped_storage()._cdata

    @precondition(lambda self: self.saved)
    @rule(which=ANY, keep=st.booleans(), again=st.booleans())
    def unpack(self, which: int, keep: bool, again: bool) -> None:
        """`keep`: backward uses it for a while; `again`: it is saved in another graph."""
        saved = self.saved[which % len(self.saved)]
        try:
            found = unpack(saved.packed)
        except StaleGraphError:
            assert saved.is_stale
            return
        except BudgetError:
            assert self.in_use  # else there is room for any one
            found = saved.expected  # so that the rules go on alike, whatever was done by now
        if saved.is_stale:
            assert not isinstance(saved.packed, SavedActivation)
            return
        assert torch.equal(found, saved.expected)
        if again:
            self.pack(found)
        if keep and found.untyped_storage()._cdata != saved.storage.cdata:
            self.in_use.append((found, saved.expected))

    @precondition(lambda self: self.saved)
    @rule(which=ANY)
    def drop(self, which: int) -> None:
        """After its backward, or without one."""
        del self.saved[which % len(self.saved)]

    @rule(which=ANY)
    def end_use(self, which: int) -> None:
        if self.in_use:
            found, expected = self.in_use.pop(which % len(self.in_use))
            assert torch.equal(found, expected)

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "rig"):
            assert self.rig.used() <= HOST


@pytest.mark.parametrize("backend", BACKENDS)
def test_anything(backend: str) -> None:
    machine = type("Machine", (StoreMachine,), {"backend": backend})
    case = machine.TestCase
    case.settings = settings(stateful_step_count=50, phases=[Phase.reuse, Phase.generate])
    case().runTest()
