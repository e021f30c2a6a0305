"""hetero/runtime: parameters are released whatever happens, and threads do not meet."""

from __future__ import annotations

import contextlib
import errno
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.state import managed_param
from hetero.state.managed_param import ManagedParam, ParamState
from offload.memory.tiers import Tier
from tests.support.training.loops import build
from tests.support.training.smallest import smallest_host_memory

pytestmark = pytest.mark.usefixtures("nothing_left")


SIZE = 64  # each parameter is a chunk of one slot
LEAST = "144KiB"  # the smallest budget: what is homed in RAM is not gathered


class Stop(Exception):
    """Raised in the middle."""


class Wide(nn.Module):
    """Uses three chunks at once, for which there must be slots."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.eye(SIZE) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.parts
        return x @ first @ second @ third


class Net(nn.Module):
    """A parameter of its own, and modules that leave slots free for another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((SIZE, SIZE), 2.0))
        self.first = nn.Linear(SIZE, SIZE, bias=False)
        self.wide = nn.ModuleList([Wide()])
        self.last = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: torch.Tensor, wide: bool = False) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.wide[0](x) if wide else x) @ self.scale


def on_disk(path: Path) -> tuple[Net, hetero.HybridAdam]:
    """The net with all its state on disk."""
    model, optimizer = build(
        Net,
        placement_policy="nvme",
        dtype="fp32",
        chunk_numel=SIZE**2,
        nvme_path=str(path),
        host_memory=LEAST,
        debug={"overlap_updates": "none"},
    )
    assert isinstance(model, Net)
    assert {*optimizer.engine.placement.param} == {Tier.DISK}
    return model, optimizer


def inputs() -> torch.Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))


def assert_nothing_is_used(optimizer: hetero.HybridAdam) -> None:
    members = optimizer.engine.params.in_order()
    assert {m.name: m.uses for m in members if m.uses} == {}
    assert {m.state for m in members} == {ParamState.OFFLOADED}
    gc.collect()  # an exception's frames may view copies
    assert sum(g.params.copies.pinned() for g in optimizer.engine.chunk_groups) == 0


def train_a_step(model: Net, optimizer: hetero.HybridAdam) -> None:
    optimizer.zero_grad()
    optimizer.backward(model(inputs(), wide=True).square().mean())
    optimizer.step()


@pytest.mark.parametrize("where", ["own module", "outside its module", "gathered()"])
def test_a_write_while_parameters_are_used_is_kept(where: str, tmp_path: Path) -> None:
    model, optimizer = on_disk(tmp_path)
    parts = list(model.wide[0].parts)
    before = [part.detach().clone() for part in parts]

    def write(*_: object) -> None:
        with torch.no_grad():
            torch._foreach_mul_(parts[:2], 2.0)

    if where == "gathered()":
        with hetero.gathered(parts):
            write()
    else:
        writer = model.wide[0] if where == "own module" else model.last
        handle = writer.register_forward_pre_hook(write)
        model(inputs(), wide=True)
        handle.remove()
    for number, (part, old) in enumerate(zip(parts, before, strict=True)):
        assert torch.equal(part, old * (2 if number < 2 else 1))
    assert_nothing_is_used(optimizer)
    train_a_step(model, optimizer)
    optimizer.engine.close()


def test_threads_run_forwards_of_one_model_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread stops inside a forward while another one runs a whole one, and then goes on.

    One at a time changes parameters, their memory and their class: neither puts back what another
    one has changed. And the memory of what a thread uses stays: torch has a lock of it, and waits
    for the GIL, which setting `.data` would hold.
    """
    model, optimizer = on_disk(tmp_path)
    become = managed_param.become
    given: list[nn.Parameter] = []
    held: list[bool] = []

    def noted(param: nn.Parameter, data: torch.Tensor, absent: bool) -> None:
        given.append(param)
        held.append(managed_param._CHANGING._is_owned())  # type: ignore[attr-defined]
        become(param, data, absent)

    monkeypatch.setattr(managed_param, "become", noted)
    x = inputs()
    with torch.no_grad():
        expected = model(x)
        with another_inside(model) as found:
            used = [m for m in optimizer.engine.params.in_order() if m.uses]
            given.clear()
            assert torch.equal(model(x), expected)
            assert given
            assert not {id(param) for param in given} & {id(m.param) for m in used}
            assert used == [m for m in optimizer.engine.params.in_order() if m.uses]
            names = {m.name for m in used}
            assert names == {"scale", "first.weight"}, "what the other thread uses stays"
    assert torch.equal(found[0], expected)
    assert held
    assert all(held)
    found.clear()
    assert_nothing_is_used(optimizer)
    train_a_step(model, optimizer)
    optimizer.engine.close()


def test_a_use_while_parameters_become_one_threads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the class of absent ones until then, and with it each use comes to hetero."""
    model, optimizer = on_disk(tmp_path)
    x = inputs()
    with torch.no_grad():
        expected = x @ model.scale
    inside, changing, used = threading.Event(), threading.Event(), threading.Event()
    main = threading.current_thread()
    found: list[torch.Tensor | Exception] = []
    guard = ManagedParam.guard

    def stop(*_: object) -> None:
        if threading.current_thread() is not main:
            inside.set()
            assert changing.wait(60)
            try:
                found.append(x @ model.scale)
            except RecursionError as error:
                found.append(error)
            used.set()

    def pause(self: ManagedParam, guarded: bool) -> None:
        if not guarded:
            changing.set()
            assert used.wait(60)
        guard(self, guarded)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    handle = model.first.register_forward_pre_hook(stop)
    thread = threading.Thread(target=forward)
    thread.start()
    assert inside.wait(60)
    monkeypatch.setattr(ManagedParam, "guard", pause)
    with torch.no_grad():
        model(x)
    thread.join()
    handle.remove()
    assert isinstance(found[0], torch.Tensor), found[0]
    assert torch.equal(found[0], expected)
    optimizer.engine.close()


@contextlib.contextmanager
def another_inside(model: Net) -> Iterator[list[torch.Tensor]]:
    """Another thread is inside a forward, before the first layer, until the block ends; it yields
    where the output goes."""
    inside, go_on = threading.Event(), threading.Event()
    main = threading.current_thread()
    found: list[torch.Tensor] = []

    def stop(*_: object) -> None:
        if threading.current_thread() is not main:
            inside.set()
            assert go_on.wait(60)

    handle = model.first.register_forward_pre_hook(stop)
    thread = threading.Thread(target=lambda: found.append(model(inputs()).detach()))
    thread.start()
    try:
        assert inside.wait(60)
        yield found
    finally:
        go_on.set()
        thread.join()
        handle.remove()


def test_what_a_thread_left_behind_is_released(tmp_path: Path) -> None:
    """SystemExit, as KeyboardInterrupt, ends a forward without torch's calling its hooks."""
    model, optimizer = on_disk(tmp_path)

    def leave(*_: object) -> None:
        raise SystemExit

    handle = model.first.register_forward_pre_hook(leave)

    def forward() -> None:
        with contextlib.suppress(SystemExit):
            model(inputs())

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    handle.remove()
    train_a_step(model, optimizer)
    assert_nothing_is_used(optimizer)
    optimizer.engine.close()


@pytest.mark.parametrize("where", ["disk", "RAM"])
def test_a_load_that_is_interrupted_in_a_child(where: str, tmp_path: Path) -> None:
    """Its parents are released, and what came before is loaded, as in plain PyTorch."""
    if where == "disk":
        model, optimizer = on_disk(tmp_path)
    else:
        model, optimizer = build(Net, placement_policy="cpu", dtype="fp32", chunk_numel=SIZE**2)
    state = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}

    def stop(*_: object) -> None:
        raise Stop

    handle = model.last._register_load_state_dict_pre_hook(stop)
    with pytest.raises(Stop):
        model.load_state_dict(state)
    handle.remove()
    for param in (model.scale, model.first.weight):
        with hetero.gathered(param):
            assert bool((param == 3.0).all())
    train_a_step(model, optimizer)
    if where == "disk":
        assert_nothing_is_used(optimizer)
    model.load_state_dict(state)
    assert all(bool((master == 3.0).all()) for master in hetero.masters(model.parameters()))
    train_a_step(model, optimizer)
    optimizer.engine.close()


def test_a_load_whose_read_fails_releases_everything(tmp_path: Path) -> None:
    model, optimizer = on_disk(tmp_path)
    state = model.state_dict()
    train_a_step(model, optimizer)
    optimizer.engine.synchronize()
    disk = optimizer.engine.chunk_groups[0].disk
    assert disk is not None
    disk.io.inject("read", 1, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        model.load_state_dict(state)
    model.load_state_dict(state)
    train_a_step(model, optimizer)
    assert_nothing_is_used(optimizer)
    optimizer.engine.close()


def test_attention_in_evaluation_does_not_depend_on_the_placement(tmp_path: Path) -> None:
    """torch has an operator of its own there, if all weights of a layer are in memory."""

    def make(**options: Any) -> Any:
        layer = nn.TransformerEncoderLayer(SIZE, 2, SIZE, batch_first=True)
        options |= {"dtype": "bf16", "chunk_numel": SIZE**2}
        return build(lambda: nn.Sequential(nn.TransformerEncoder(layer, 2)), **options)

    found = []
    on_disk = {"placement_policy": "nvme", "nvme_path": str(tmp_path)}
    least = smallest_host_memory(lambda: make(host_memory=64 << 10, **on_disk))
    for options in ({"placement_policy": "cpu"}, on_disk | {"host_memory": least}):
        torch.manual_seed(0)
        model, optimizer = make(**options)
        model.eval()
        x = torch.randn(3, 6, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
        with torch.no_grad():
            attention = model[0].layers[0].self_attn
            found.append((model(x), model[0](x), attention(x, x, x)[0]))
        assert torch.backends.mha.get_fastpath_enabled()
        optimizer.engine.close()
    for in_ram, from_disk in zip(*found, strict=True):
        assert torch.equal(in_ram, from_disk)
