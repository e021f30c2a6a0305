"""backend='cuda' over a fake device that copies as late as it may: the same bits as on the CPU.

What only a true device shows is in tests/cuda.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from offload.device.cuda_backend import CudaBackend
from offload.device.device_arena import NOT_PAGE_LOCKED
from offload.device.fetch_queue import FetchQueue
from offload.errors import BudgetError, HeteroError
from offload.memory.arena import HostArena
from offload.memory.tiers import Tier
from tests.support.cuda.delays import delayed_streams
from tests.support.cuda.ranks import fake_device
from tests.support.native.fake_cuda import FakeRuntime
from tests.support.training.emulated import (
    LARGE,
    PLACES,
    assert_same_bits,
    data,
    emulated,
    reference,
    trained,
)
from tests.support.training.loops import Run, batches, build
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    """The device that Config's backend will be; what torch computes is watched."""
    with fake_device() as made:
        yield made


def options(path: Path, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    return emulated(path, settings, backend="cuda", **more)


@pytest.mark.covering(1)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "dtype",
    ["bf16", *(pytest.param(other, marks=pytest.mark.extra) for other in ("fp32", "fp16"))],
)
@pytest.mark.parametrize("place", PLACES)
def test_same_bits_as_cpu(
    runtime: FakeRuntime, place: str, dtype: str, accumulate: int, tmp_path: Path
) -> None:
    engine = assert_same_bits(tmp_path, PLACES[place], dtype, accumulate, backend="cuda")
    assert engine.backend.kind == "cuda"
    assert runtime.page_locked == {}


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("rule", "of_rule"),
    [
        ("HybridLion", {}),
        ("HybridAdagrad", {}),
        ("HybridSGD", {"momentum": 0.9}),
        ("HybridMuon", {"lr": 0.02}),
    ],
)
@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
def test_other_rules(
    runtime: FakeRuntime,
    place: str,
    rule: str,
    of_rule: dict[str, float],
    state_dtype: str,
    tmp_path: Path,
) -> None:
    found = []
    for given in (
        {"placement_policy": "cpu", "chunk_numel": 4096},
        options(tmp_path, {"device_memory": LARGE, **PLACES[place]}),
    ):
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64, bias=False) for _ in range(2)]  # matrices, for Muon
        model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
        optimizer = getattr(hetero, rule)(model.parameters(), state_dtype=state_dtype, **of_rule)
        hetero.initialize(model, optimizer, {"dtype": "bf16", "backend": "cpu", **given})
        for seed in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(hetero.masters(model.parameters()))
        optimizer.engine.close()
    assert all(map(torch.equal, *found))


def test_a_step_waits_for_nothing_if_all_is_on_the_device(
    runtime: FakeRuntime, tmp_path: Path
) -> None:
    model, optimizer = build(
        **options(tmp_path, {"placement_policy": "cuda", "device_memory": LARGE})
    )
    for x in batches(2):
        before = runtime.synchronized
        optimizer.backward(model(input_ids=x, labels=x).loss)
        optimizer.step()
        optimizer.zero_grad()
        assert runtime.synchronized == before
    optimizer.engine.close()


def test_the_host_does_not_wait_for_fetches(runtime: FakeRuntime, tmp_path: Path) -> None:
    model, optimizer = build(**options(tmp_path, {"placement_policy": "cpu"}))
    x = batches(1)[0]
    with torch.no_grad():
        model(input_ids=x)
        before = runtime.synchronized
        model(input_ids=x)
        assert runtime.synchronized == before
    assert optimizer.engine.traffic.h2d > 0
    optimizer.engine.close()


def test_values_that_the_host_changes_while_they_are_fetched(
    runtime: FakeRuntime, tmp_path: Path
) -> None:
    """The copy is as late as it may be; what it reads must not have been changed by then."""
    model, optimizer = build(**options(tmp_path, {"placement_policy": "cpu"}, dtype="fp32"))
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):
        with torch.no_grad():
            model(input_ids=batches(1)[0])
        expected = {k: v + 1 for k, v in expected.items()}
        model.load_state_dict(expected)
        assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
    optimizer.engine.close()


def test_a_home_changes_when_nothing_copies_from_it(runtime: FakeRuntime, tmp_path: Path) -> None:
    """What the device computes with such a copy may be as late as the copy."""
    _model, optimizer = build(**options(tmp_path, {"placement_policy": "cpu"}))
    (chunk_group,) = optimizer.engine.chunk_groups
    copies, chunk = chunk_group.params.copies, chunk_group.layout.chunks[0]
    copies.cache.begin(chunk.id, must=True)
    assert runtime.copying
    copies.drop(chunk)
    assert not runtime.copying
    optimizer.engine.close()


def test_a_device_that_is_full(runtime: FakeRuntime, tmp_path: Path) -> None:
    runtime.total = 1 << 20
    with pytest.raises(BudgetError, match=r"no room for .* of 1.0 MiB .* lower device_memory"):
        build(**options(tmp_path, {"placement_policy": "cuda", "device_memory": LARGE}))
    runtime.taken.clear()
    _model, optimizer = build(**options(tmp_path, {"placement_policy": "cpu"}))
    optimizer.engine.close()


def test_the_first_forward_may_be_in_any_stream(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where torch's copies of buffers are done as late as they may."""
    default = runtime.new_stream()

    def to(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        there = torch.full_like(tensor, 7)
        runtime.order.forget(there.data_ptr(), there.nbytes)  # torch orders what it allocates
        runtime.give(
            default, lambda: there.copy_(tensor), writes=[(there.data_ptr(), there.nbytes)]
        )
        return there

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        _, optimizer = hetero.initialize(
            model, hetero.HybridAdam(model.parameters()),
            backend="cuda", placement_policy="cuda", dtype="fp32",
        )  # fmt: skip
    tensors = [*model.parameters(), *model.buffers()]
    used = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    runtime.order.use(runtime.new_stream(), used, writes=False)  # fails if nothing orders it
    assert model[1].running_var is not None
    assert model[1].running_var.tolist() == [1.0] * 4
    optimizer.engine.close()


@pytest.mark.parametrize("around", [lambda _: nullcontext(), hetero.gathered])
def test_a_chunk_may_be_used_in_several_streams(
    around: Callable[..., Any], runtime: FakeRuntime, tmp_path: Path
) -> None:
    """A child's work in a stream of its own, which nobody waits for before the end of the forward,
    has read the chunk's slots before they get another one's bytes, also where the first stream has
    the child's parameter in use."""
    side = runtime.new_stream()
    kept: list[torch.Tensor] = []  # no memory that one stream frees is another's

    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here = nn.Parameter(torch.randn(64, 64))
            self.there = nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(x)
            runtime.wait(side, runtime.record(runtime.compute))
            with around(self.there.weight), runtime.on(side):
                kept.append(self.there(x))
            return x @ self.here

    torch.manual_seed(0)
    model = nn.Sequential(*(Forked() for _ in range(6)))
    given = options(tmp_path, {"placement_policy": "cpu"}, dtype="bf16", chunk_numel=8192)
    optimizer = hetero.HybridAdam(model.parameters())
    hetero.initialize(model, optimizer, {**given, "device_memory": "100KiB"})
    with torch.no_grad():
        for _ in range(2):
            kept.append(model(torch.randn(4, 64)))
            runtime.wait(runtime.compute, runtime.record(side))
    assert optimizer.engine.traffic.h2d > 12 * 8192 * 2 * 0.8
    optimizer.engine.close()


def test_a_save_has_the_updates_of_any_stream(runtime: FakeRuntime, tmp_path: Path) -> None:
    """It is made in a thread of its own, where another stream is the current one."""
    settings = {"placement_policy": "cuda", "device_memory": LARGE}
    model, optimizer = build(**options(tmp_path, settings, dtype="bf16"))
    (x,) = batches(1)
    optimizer.backward(model(input_ids=x, labels=x).loss)
    side = runtime.new_stream()
    runtime.wait(side, runtime.record(runtime.compute))
    with runtime.on(side):
        optimizer.step()
        hetero.save(tmp_path / "saved", model, optimizer)
    runtime.synchronize_all()
    optimizer.zero_grad()
    wanted = hetero.masters(model.parameters())
    hetero.load(tmp_path / "saved", model, optimizer)
    assert all(map(torch.equal, hetero.masters(model.parameters()), wanted))
    optimizer.engine.close()


def test_ram_that_cannot_be_pinned_is_told_and_used(runtime: FakeRuntime, tmp_path: Path) -> None:
    runtime.page_lockable = False
    model, optimizer = build(**options(tmp_path, {"placement_policy": "cpu"}, dtype="bf16"))
    assert [n for n in optimizer.engine.notes if NOT_PAGE_LOCKED in n]
    assert trained(model, optimizer).same_bits(reference("bf16"))


def test_a_gradient_that_is_lost_on_the_link(runtime: FakeRuntime, tmp_path: Path) -> None:
    model, optimizer = build(**options(tmp_path, {"placement_policy": "cpu"}, dtype="bf16"))
    x = batches(1)[0]
    loss = model(input_ids=x, labels=x).loss
    runtime.failure = "CUDA error: unspecified launch failure"
    optimizer.backward(loss)
    with pytest.raises(HeteroError, match="did not arrive in RAM: .*copy of .* unspecified launch"):
        optimizer.step()
    optimizer.engine.close()


def test_what_compute_takes_beside_the_arenas(runtime: FakeRuntime, tmp_path: Path) -> None:
    _model, optimizer = build(**options(tmp_path, {"placement_policy": "cpu"}))
    backend = optimizer.engine.backend
    backend.reset_beside()
    assert backend.beside_bytes() == 0
    activations = runtime.empty(12345)
    assert backend.beside_bytes() == 12345
    del activations
    optimizer.engine.close()


# Homes that move


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", ["auto", "nvme"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_homes_and_slots_move_and_bits_are_the_same(
    runtime: FakeRuntime, dtype: str, policy: str, tmp_path: Path
) -> None:
    """Between backward and step: gradients move, too, and optimizer states, which are not
    pinned.
    """
    given = options(tmp_path, {"placement_policy": policy}, dtype=dtype)
    model, optimizer = build(**{**given, "device_memory": "2MiB", "host_memory": "16MiB"})
    engine = optimizer.engine
    ways = [("1MiB", "600KiB"), ("16MiB", "600KiB"), ("1MiB", LARGE), ("16MiB", "1MiB")]
    run, counts = Run(), []
    for number, x in enumerate(data()):
        loss = model(input_ids=x, labels=x).loss
        optimizer.backward(loss)
        run.losses.append(loss.item())
        del loss
        engine.set_budget(*ways[number % len(ways)])
        counts.append(engine.placement.param.count(Tier.DEVICE))
        arenas = sum(runtime.taken.values())
        assert arenas == engine.ledger.in_use_bytes["device"]
        run.norms.append(hetero.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    expected = reference(dtype)
    run.masters = hetero.masters(model.parameters())
    assert (run.losses, run.norms) == (expected.losses, expected.norms)
    assert all(map(torch.equal, run.masters, expected.masters))
    assert len(set(counts)) > 1 or policy == "nvme"
    ledger = engine.ledger
    engine.close()
    assert set(ledger.in_use_bytes.values()) == {0}
    assert runtime.page_locked == {}
    assert runtime.taken == {}


def test_streams_that_sleep_change_no_bit(runtime: FakeRuntime, tmp_path: Path) -> None:
    model, optimizer = build(**options(tmp_path, {"placement_policy": "nvme"}, dtype="bf16"))
    with delayed_streams(runtime, seed=0) as slept:
        assert trained(model, optimizer).same_bits(reference("bf16"))
    assert slept == set(runtime.streams)


def test_homes_that_leave_the_device_do_not_stop_it_each(
    runtime: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(tmp_path, {"placement_policy": "auto"}, dtype="bf16", device_memory=LARGE)
    model, optimizer = build(**given)
    engine = optimizer.engine
    homes = 3 * engine.placement.param.count(Tier.DEVICE)
    synchronize_all, stops = runtime.synchronize_all, []
    monkeypatch.setattr(runtime, "synchronize_all", lambda: stops.append(synchronize_all()))
    engine.set_budget(device_memory="600KiB")
    assert homes - 3 * engine.placement.param.count(Tier.DEVICE) > 3
    assert len(stops) == 1
    monkeypatch.undo()
    assert trained(model, optimizer).same_bits(reference("bf16"))


def test_a_copy_that_failed_leaves_homes_where_they_were(
    runtime: FakeRuntime, tmp_path: Path
) -> None:
    model, optimizer = build(
        **options(tmp_path, {"placement_policy": "auto"}, dtype="bf16", device_memory=LARGE)
    )
    engine = optimizer.engine
    placed = engine.placement
    runtime.failure = "CUDA error: unspecified launch failure"
    with pytest.raises(OSError, match="unspecified launch failure"):
        engine.set_budget(device_memory="600KiB")
    assert engine.placement == placed
    runtime.failure = None
    engine.set_budget(device_memory="600KiB")
    assert trained(model, optimizer).same_bits(reference("bf16"))


def test_a_device_without_room_for_homes_leaves_them_where_they_were(
    runtime: FakeRuntime, tmp_path: Path
) -> None:
    """Others have taken what the budget promises."""
    model, optimizer = build(**options(tmp_path, {"placement_policy": "auto"}, dtype="bf16"))
    engine = optimizer.engine
    placed = engine.placement
    runtime.total = sum(runtime.taken.values()) + (500 << 10)
    with pytest.raises(BudgetError, match="the device has no room"):
        engine.set_budget(device_memory=LARGE)
    assert engine.placement == placed
    runtime.total = 1 << 30
    engine.set_budget(device_memory=LARGE)
    assert trained(model, optimizer).same_bits(reference("bf16"))


def test_capturing_a_training_step_is_refused(runtime: FakeRuntime, tmp_path: Path) -> None:
    """Also if all is resident, so that nothing is gathered: gradients are taken by hooks."""
    settings = {"placement_policy": "cuda", "device_memory": LARGE}
    model, optimizer = build(**options(tmp_path, settings, dtype="bf16"))
    (tokens,) = batches(1)
    runtime.captures = True
    with pytest.raises(HeteroError, match="CUDA graph is being captured"):
        model(input_ids=tokens)
    runtime.captures = False
    assert trained(model, optimizer).same_bits(reference("bf16"))


def test_slots_in_ram_stay_pinned_until_no_copy_uses_them(
    runtime: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies from slots where the file is read are under way when homes move, and take long."""
    settings = {"placement_policy": "nvme", "host_memory": "500KiB"}
    _model, optimizer = build(**options(tmp_path, settings, dtype="bf16"))
    engine = optimizer.engine
    go_on, synchronize = threading.Event(), runtime.synchronize
    clear, close = FetchQueue.clear, HostArena.close
    closed_after_copies: list[bool] = []

    def slowly(event: Any) -> None:
        if threading.current_thread().name == "hetero-copying":
            assert go_on.wait(PATIENCE_S)
        synchronize(event)

    def watched_clear(fetches: FetchQueue) -> None:
        threading.Timer(0.1, go_on.set).start()
        clear(fetches)

    def watched_close(arena: HostArena) -> None:
        closed_after_copies.append(go_on.is_set())
        close(arena)

    monkeypatch.setattr(runtime, "synchronize", slowly)
    monkeypatch.setattr(CudaBackend, "synchronize", lambda _: None)  # which would do them all
    cache = engine.chunk_groups[0].params.copies.cache
    assert cache is not None
    cache.start(0)
    until(lambda: runtime.copying)
    monkeypatch.setattr(FetchQueue, "clear", watched_clear)
    monkeypatch.setattr(HostArena, "close", watched_close)
    engine.set_budget("700KiB")
    assert closed_after_copies
    assert all(closed_after_copies)
    monkeypatch.undo()
    engine.close()
