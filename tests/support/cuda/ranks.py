"""Ranks that compute on a fake CUDA device each. Each function runs on every rank."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hetero
from offload.device.cuda_backend import CudaBackend
from offload.memory.tiers import Tier
from tests.support.cuda.fake_nccl import FakeNccl
from tests.support.cuda.watch import Watch
from tests.support.native.fake_cuda import FakeRuntime
from tests.support.ranks.rank_training import finish, inputs, make, train_step

STEPS = 2


@contextmanager
def fake_device(nccl: bool = False, watched: bool = True) -> Iterator[FakeRuntime]:
    """Inside the block backend="cuda" is a fake device of this rank's own; `nccl`: with NCCL.

    Unless `watched`, operators of torch are not seen: to Watch all RAM is the device's, also what
    one allocator gives a loop that has two streams.
    """
    made = FakeRuntime(nccl=nccl)
    with (
        patch("hetero.config.cuda_available", lambda: True),
        patch("hetero.config.default_device_bytes", lambda *_: 64 << 20),
        patch("hetero.config.CudaBackend", lambda: CudaBackend(made)),
        Watch(made) if watched else nullcontext(),
    ):
        yield made


def replicas_mesh(world: int, replicas: int) -> dict[str, Any]:
    """The argument of initialize() for so many replicas."""
    if replicas == 1:
        return {}
    return {"mesh": init_device_mesh("cpu", (replicas, world // replicas))}


def train(
    rank: int,
    world: int,
    options: dict[str, Any],
    accumulate: int = 1,
    replicas: int = 1,
    nccl: bool = False,
) -> dict[str, Any]:
    """Trains on the fake device, or where `options` say; clips every other step.

    Returns losses, masters, what the device had at most, and the link's traffic.
    """
    options = {"backend": "cuda", "chunk_numel": 16384, "rank_timeout_s": 60.0} | options
    is_on_device = options["backend"] == "cuda"
    with fake_device(nccl) if is_on_device else contextlib.nullcontext() as runtime:
        model, optimizer = make("layers", options, **replicas_mesh(world, replicas))
        engine = optimizer.engine
        losses = []
        for step in range(STEPS):
            for micro_batch in range(accumulate):
                loss = model(inputs(rank, 10 * step + micro_batch, 128)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            if step % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        crossed = engine.traffic.h2d, engine.traffic.d2h
        gathering = engine.chunk_groups[0].ranks.gathering
        gathers = 0 if gathering is None else gathering.counts.started
        found = {
            "losses": losses,
            "masters": hetero.masters(model.parameters()),
            "state": {name: t.clone() for name, t in model.state_dict().items()},
            "peak": engine.ledger.peak_bytes["device"],
            "budget": engine.ledger.budget_bytes["device"],
            "chunks": sum(c.slots for g in engine.params.chunk_groups for c in g.layout.chunks),
            "numel": sum(p.numel() for p in model.parameters()),
            "h2d": crossed[0],
            "gathers": gathers,
            "d2h": crossed[1],
        }
        engine.close()
        page_locked = {} if runtime is None else dict(runtime.page_locked)
        found["left"] = (dict(engine.ledger.in_use_bytes), page_locked)
    return found


def read_after_a_step_in_a_stream(rank: int, world: int, options: dict[str, Any]) -> bool:
    """Whether the first rank alone has read, just after a step in a stream of the loop's own, the
    masters that all read when the devices are done."""
    with fake_device(watched=False) as runtime:
        model, optimizer = make("layers", {"backend": "cuda", "chunk_numel": 16384} | options)
        model(inputs(rank, 0, 128)).square().mean().backward()
        side = runtime.new_stream()
        # The first rank's torch computes in it, at once; the other's work comes as late as it may.
        side.eager = rank == 0
        runtime.wait(side, runtime.record(runtime.compute))
        with runtime.on(side):
            optimizer.step()
            early = hetero.masters(model.parameters()) if rank == 0 else []
        dist.barrier()
        runtime.synchronize_all()
        dist.barrier()
        late = hetero.masters(model.parameters())
        optimizer.engine.close()
    return rank > 0 or all(map(torch.equal, early, late))


def with_nccl(rank: int, world: int, function: Callable[..., Any], *args: Any) -> Any:
    """What `function` of a rank returns where backend="cuda" is a fake device with NCCL."""
    with fake_device(nccl=True):
        return function(rank, world, *args)


def refused(rank: int, world: int, function: Callable[..., Any], *args: Any) -> str:
    """What `function` of a rank is told, for whom a budget is too small."""
    try:
        function(rank, world, *args)
    except hetero.BudgetError as error:
        return str(error)
    return "nothing"


def without_other(rank: int, world: int, how: str, where: str, more: dict[str, Any]) -> str:
    """Rank 1's device does not send what rank 0's waits for: what rank 0 is told.

    `more` are options; "replicas" is the number of these.

    Rank 1 "dies" before its device is told to make the collective `where`, when all ranks have come
    for that; or it "hangs" until rank 0 was told.
    """
    options = {"backend": "cuda", "chunk_numel": 16384, "device_memory": "1MiB"} | more
    options["rank_timeout_s"] = 60.0 if how == "dies" else 2.0
    mesh = replicas_mesh(world, options.pop("replicas", 1))
    store, begins = dist.distributed_c10d._get_default_store(), [False]
    give = getattr(FakeNccl, where)

    def lost(self: FakeNccl, *args: Any) -> Any:
        if begins[0] and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if begins[0]:
            store.get("rank 0 was told")
        return give(self, *args)

    with fake_device(nccl=True), contextlib.ExitStack() as patches:
        if rank == 1:
            patches.enter_context(patch.object(FakeNccl, where, lost))
        model, optimizer = make("layers", options, **mesh)
        train_step(model, optimizer, inputs(rank, 0, 128))
        begins[0] = True
        told = ""
        try:
            model(inputs(rank, 1, 128)).square().mean().backward()
            optimizer.step()
        except hetero.PeerError as error:
            told = str(error)
        store.set("rank 0 was told", "")
        with contextlib.suppress(hetero.HeteroError):
            optimizer.engine.close()
    return told


def train_experts(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """The masters after steps in which ranks use different experts, of which one is never used."""
    where: dict[str, Any] = {"chunk_numel": 4096, "rank_timeout_s": 60.0}
    model, optimizer = make("experts", where | options)
    for step in range(STEPS):
        for micro_batch in range(2):
            loss = model(inputs(rank, 2 * step + micro_batch), (rank + step) % 3).square().mean()
            loss.backward()
        hetero.clip_grad_norm_(model.parameters(), 1e-2 if step % 2 else 9.0)
        optimizer.step()
        optimizer.zero_grad()
    return finish(model, optimizer)


def train_and_load(
    rank: int, world: int, options: dict[str, Any], path: str
) -> list[list[torch.Tensor]]:
    """The masters after a step that follows a save, and after the same step from what was loaded in
    the middle of another one."""
    where: dict[str, Any] = {"chunk_numel": 16384, "rank_timeout_s": 60.0}
    model, optimizer = make("layers", where | options)
    found = []

    train_step(model, optimizer, inputs(rank, 0, 128), clip=1e-2)
    hetero.save(path, model, optimizer)
    for is_loaded in (False, True):
        if is_loaded:
            train_step(model, optimizer, inputs(rank, 2, 128), clip=1e-2)
            hetero.load(path, model, optimizer)
        train_step(model, optimizer, inputs(rank, 1, 128), clip=1e-2)
        found.append(hetero.masters(model.parameters()))
    optimizer.engine.close()
    return found


def train_while_budgets_move(
    rank: int, world: int, options: dict[str, Any], budgets: list[str]
) -> list[torch.Tensor]:
    """The masters after a step with each of `budgets` of device_memory, if there is a device.

    In stages 1 and 2 rank 1 has the budgets in the reverse order.
    """
    if rank == 1 and options.get("zero_stage", 3) < 3:
        budgets = budgets[::-1]
    where: dict[str, Any] = {"chunk_numel": 16384, "rank_timeout_s": 60.0}
    model, optimizer = make("layers", where | options)
    for number, budget in enumerate(budgets):
        if options["backend"] == "cuda":
            optimizer.engine.set_budget(device_memory=budget)
        train_step(model, optimizer, inputs(rank, number, 128), clip=1e-2 if number % 2 else 9.0)
    return finish(model, optimizer)


def homes_after_a_move(
    rank: int, world: int, options: dict[str, Any], budget: str
) -> tuple[int, int]:
    """After set_budget(device_memory=budget): slots for what passes through the device, and chunks
    that are not at home there."""
    _, optimizer = make("layers", {"chunk_numel": 16384, "rank_timeout_s": 60.0} | options)
    optimizer.engine.set_budget(device_memory=budget)
    made = optimizer.engine.placement
    optimizer.engine.close()
    return made.unkept_slots, sum(tier is not Tier.DEVICE for tier in made.param)


def train_on_gpu(
    rank: int, world: int, options: dict[str, Any], replicas: int = 1
) -> list[torch.Tensor]:
    """As train(), on the GPUs that this machine has, of which ranks may share one.

    Returns the losses and the masters.
    """
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.use_deterministic_algorithms(True, warn_only=True)
    given = {"backend": "cuda", "chunk_numel": 16384, "rank_timeout_s": 60.0, "dtype": "bf16"}
    model, optimizer = make("layers", given | options, **replicas_mesh(world, replicas))
    found = []
    for number in range(STEPS):
        x = inputs(rank, number, 128).cuda()
        found.append(train_step(model, optimizer, x, clip=1e-3 if number % 2 else 9.0).cpu())
    return found + finish(model, optimizer)
