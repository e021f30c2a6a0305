"""What ranks do in tests: functions that can be pickled. Each runs on every rank."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hetero
from offload.memory.tiers import Account, Tier
from tests.support.own_process import descriptors
from tests.support.training.loops import batches, tiny_gpt2
from tests.support.training.smallest import smallest_host_memory
from tests.support.waiting import until

BASE = {"dtype": "fp32", "placement_policy": "cpu", "rank_timeout_s": 60.0}


class Layers(nn.Module):
    """`count` square matrices of 16384 elements, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Experts(nn.Module):
    """Of `count` experts one is used; which one is said from outside."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.experts = nn.ModuleList([nn.Linear(64, 64) for _ in range(count)])

    def forward(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        return x if expert is None else self.experts[expert](x)


def make(
    model: str, options: dict[str, Any], lr: float = 1e-2, **where: Any
) -> tuple[nn.Module, hetero.HybridAdam]:
    """A model under seed 0 and its optimizer, initialized over the ranks."""
    makers = {"gpt2": tiny_gpt2, "layers": lambda: Layers(12), "experts": lambda: Experts(4)}
    torch.manual_seed(0)
    given = BASE | options
    state_dtype = given.pop("state_dtype", "fp32")
    with hetero.ZeroInitContext(given, **where):
        made = makers[model]()
    optimizer = hetero.HybridAdam(
        made.parameters(), lr=lr, weight_decay=0.1, state_dtype=state_dtype
    )
    return hetero.initialize(made, optimizer)


def inputs(rank: int, step: int, width: int = 64) -> torch.Tensor:
    """A batch for Layers and Experts."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, width, generator=generator)


def train_step(
    model: nn.Module, optimizer: hetero.HybridAdam, *given: Any, clip: float | None = None
) -> torch.Tensor:
    """A step on the mean square of what the model makes of `given`, which is returned."""
    loss = model(*given).square().mean()
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def told(use: Callable[[], object]) -> str:
    """The class and the text of the error that `use` raises; nothing if it raises none."""
    try:
        use()
    except (hetero.HeteroError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def finish(model: nn.Module, optimizer: hetero.HybridAdam) -> list[torch.Tensor]:
    """The masters of a training that ends."""
    masters = hetero.masters(model.parameters())
    optimizer.engine.close()
    return masters


def train(
    rank: int,
    world: int,
    options: dict[str, Any],
    steps: int = 3,
    accumulate: int = 1,
    sync_each: bool = True,
    mesh: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Trains tiny_gpt2 on this rank's share of the data; what it saw."""
    where = {} if mesh is None else {"mesh": init_device_mesh("cpu", mesh)}
    model, optimizer = make("gpt2", options, **where)
    engine = optimizer.engine
    data = batches(steps * accumulate * world)[rank::world]
    losses, norms = [], []
    for step in range(steps):
        for micro in range(accumulate):
            tokens = data[step * accumulate + micro]
            held = not sync_each and micro < accumulate - 1
            with hetero.no_sync(model) if held else contextlib.nullcontext():
                loss = model(input_ids=tokens, labels=tokens).loss / accumulate
                optimizer.backward(loss)
            losses.append(loss.item())
        norms.append(hetero.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    traffic = engine.traffic
    result = {
        "losses": losses,
        "norms": norms,
        "masters": hetero.masters(list(model.parameters())),
        "disk": traffic.disk_read > 0,
        "peak": engine.ledger.peak_bytes["host"],
        "scale": engine.shared.loss_scale.value,
        "skipped": engine.shared.loss_scale.skipped_steps,
    }
    engine.close()
    return result


def train_with_default_device(
    rank: int, world: int, options: dict[str, Any], device: str | None
) -> list[torch.Tensor]:
    """Masters of Layers after steps, in which torch makes tensors on `device` by default."""
    model, optimizer = make("layers", options)
    given = [inputs(rank, step, 128) for step in range(3)]
    torch.set_default_device(device)
    try:
        for x in given:
            model(x).square().mean().backward()
            hetero.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        return finish(model, optimizer)
    finally:
        torch.set_default_device(None)


def traffic(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Bytes that one step of Layers sends and receives, once it is known what comes when."""
    model, optimizer = make("layers", {"chunk_numel": 16384} | options)
    engine = optimizer.engine
    counts = []

    def quiet_traffic() -> Any:
        """While no rank asks for anything."""
        dist.barrier()
        found = engine.traffic
        dist.barrier()
        return found

    for number in range(4):
        before = quiet_traffic()
        train_step(model, optimizer, inputs(rank, number, 128).requires_grad_())
        after = quiet_traffic()
        counts.append((after.sent - before.sent, after.received - before.received))
    capacity = engine.layout.slot_count * engine.layout.slot_numel
    used = {account.value: engine.ledger.used(Tier.HOST, account) for account in Account}
    found = {
        "last": counts[-1],
        "capacity": capacity,
        "chunks": len(engine.layout.chunks),
        "gathered_slots": engine.placement.gathered_slots,
        "used": used,
    }
    engine.close()
    return found


def construct(rank: int, world: int, options: dict[str, Any], seed_by_rank: bool) -> dict[str, Any]:
    """First values of tiny_gpt2, and the most RAM its construction took."""
    torch.manual_seed(rank if seed_by_rank else 0)
    with hetero.ZeroInitContext(BASE | options):
        model = tiny_gpt2()
    drawn = torch.rand(1).item()
    optimizer = hetero.HybridAdam(model.parameters())
    model, optimizer = hetero.initialize(model, optimizer)
    found = {
        "masters": hetero.masters(list(model.parameters())),
        "peak": optimizer.engine.ledger.peak_bytes["host"],
        "drawn": drawn,
    }
    optimizer.engine.close()
    return found


def under_construction(
    rank: int, world: int, options: dict[str, Any], modifier: int
) -> dict[str, Any]:
    """What can be done with parameters of which each rank keeps a part."""
    torch.manual_seed(0)
    with hetero.ZeroInitContext(BASE | options) as context:
        model = tiny_gpt2()
        filler = nn.Linear(400, 256)  # for which others go
        absent = [p for p in model.parameters() if context.construction.is_offloaded(p)]
        with hetero.gathered(absent[0], modifier_rank=modifier), torch.no_grad():
            absent[0].fill_(10.0 + rank)
        copied = copy.deepcopy(absent[1]).detach().clone()
        with hetero.gathered(absent[1]):
            copied_equal = torch.equal(copied, absent[1])
        again = nn.Linear(400, 256)
    del filler, again
    absent = [p for p in model.parameters() if context.construction.is_offloaded(p)]
    refusals = []
    for use in (lambda: absent[0].sum(), model.state_dict()[_name(model, absent[0])].sum):
        try:
            use()
        except hetero.HeteroError as error:
            refusals.append(str(error))
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    found = {
        "masters": hetero.masters(list(model.parameters())),
        "peak": optimizer.engine.ledger.peak_bytes["host"],
        "copied": copied_equal,
        "refusals": refusals,
    }
    optimizer.engine.close()
    return found


def _name(model: torch.nn.Module, param: torch.nn.Parameter) -> str:
    return next(name for name, p in model.named_parameters() if p is param)


def outside(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """First values of a model that was built before, of another seed on each rank."""
    torch.manual_seed(rank)
    model = Experts(2)
    model.register_buffer("seen", torch.full((3,), float(rank)))
    optimizer = hetero.HybridAdam(model.parameters())
    model, optimizer = hetero.initialize(model, optimizer, BASE | options)
    return [*finish(model, optimizer), model.seen.clone()]


def one_sided(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 alone evaluates, generates, reads weights and state, while others are in a barrier."""
    model, optimizer = make("gpt2", options)
    tokens = batches(world)[rank]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found: dict[str, Any] = {}
    if rank == 0:
        model.eval()
        with torch.no_grad():
            found["loss"] = model(input_ids=tokens, labels=tokens).loss.item()
            found["generated"] = model.generate(tokens[:, :4], max_new_tokens=5, do_sample=False)
        model.train()
        found["state"] = model.state_dict()
        found["optimizer"] = optimizer.state_dict()
        with hetero.gathered(model.transformer.wte.weight):
            found["wte"] = model.transformer.wte.weight.detach().clone()
    dist.barrier()
    # And each for another number of tokens.
    found["many"] = model.generate(tokens[:, :4], max_new_tokens=3 + 4 * rank, do_sample=False)
    return found | {"masters": finish(model, optimizer)}


def load(rank: int, world: int, options: dict[str, Any], state: Any, optimizer_state: Any) -> Any:
    """Loads what another world saved, makes one step, and says what came out."""
    model, optimizer = make("gpt2", options)
    model.load_state_dict(state)
    optimizer.load_state_dict(optimizer_state)
    tokens = batches(world)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return finish(model, optimizer)


def modified(rank: int, world: int, options: dict[str, Any], modifier: int) -> Any:
    """Weights after one rank changed one of them."""
    model, optimizer = make("experts", options)
    weight = model.inner.weight
    with hetero.gathered([weight], modifier_rank=modifier):
        weight.data.fill_(float(10 + rank))
    with hetero.gathered(model.parameters()):
        now = [p.detach().clone() for p in model.parameters()]
    optimizer.engine.close()
    return now


def two_models(rank: int, world: int, options: dict[str, Any]) -> Any:
    """Two models and optimizers, one backward, and a model that only part of the ranks share."""
    first, first_optimizer = make("experts", options)
    second, second_optimizer = make("experts", options, lr=1e-3)
    pair = dist.new_group([0, 1])
    third = None
    if rank < 2:
        torch.manual_seed(0)
        third = Experts(1)
        third_optimizer = hetero.HybridAdam(third.parameters(), lr=1e-2)
        hetero.initialize(third, third_optimizer, BASE | options, process_group=pair)
    for number in range(2):
        x = inputs(rank, number)
        made = first(x, 0)
        (second(made, 1).square().mean() + made.mean()).backward()
        first_optimizer.step()
        second_optimizer.step()
        first_optimizer.zero_grad()
        second_optimizer.zero_grad()
        if third is not None:
            train_step(third, third_optimizer, x, 0)
    found = [finish(first, first_optimizer), finish(second, second_optimizer)]
    return found if third is None else [*found, finish(third, third_optimizer)]


HANG_TIMEOUT_S = 10.0  # after which the others give up a rank that hangs
PATIENT_TIMEOUT_S = 60.0  # far longer than they need to learn that a rank failed


def failing(rank: int, world: int, options: dict[str, Any], how: str, where: str) -> dict[str, Any]:
    """The last rank fails; what the others meet, after how long, and what is left of it."""
    # What torch.distributed itself opens is no matter of ours.
    threads, files = set(threading.enumerate()), descriptors("(deleted)", "io_uring")
    bad = rank == world - 1
    meeting = dist.distributed_c10d._get_default_store()
    tokens = batches(world)[rank]

    def fail(here: str) -> None:
        if not bad or where != here:
            return
        if how == "die":
            os._exit(7)
        if how == "hang":
            until(lambda: meeting.add("given up", 0) == world - 1)
        raise ValueError("the bad rank's own error")

    dist.barrier()  # however long a rank took to start
    started = time.monotonic()
    engine = None
    try:
        timeout_s = HANG_TIMEOUT_S if how == "hang" else PATIENT_TIMEOUT_S
        if how == "raise" and bad and where == "construction":  # where hetero sees it
            with hetero.ZeroInitContext(BASE | {"rank_timeout_s": timeout_s} | options):
                fail("construction")
        fail("construction")
        model, optimizer = make("gpt2", {"rank_timeout_s": timeout_s} | options)
        engine = optimizer.engine
        # Once the ranks have met, the clock starts: what comes before takes its time.
        for step in range(2):
            if step == 1:
                dist.barrier()
                started = time.monotonic()
                fail("forward")
            loss = model(input_ids=tokens, labels=tokens).loss
            if step == 1:
                fail("backward")
            loss.backward()
            if step == 1:
                fail("clipping")
                hetero.clip_grad_norm_(model.parameters(), 1.0)
                fail("step")
            optimizer.step()
            optimizer.zero_grad()
        fail("state_dict")
        model.state_dict()
        optimizer.state_dict()
        fail("close")
    except hetero.PeerError as error:
        found = {"error": str(error), "seconds": time.monotonic() - started}
        del error
    else:
        found = {"error": None, "seconds": time.monotonic() - started}
    meeting.add("given up", 1)
    if engine is not None:
        started = time.monotonic()
        engine.close()
        found["closing"] = time.monotonic() - started
        del engine, model, optimizer
    gc.collect()
    deadline = time.monotonic() + (5.0 if how == "hang" else 30.0)
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    found["threads"] = [t.name for t in set(threading.enumerate()) - threads]
    found["files"] = sorted(descriptors("(deleted)", "io_uring") - files)
    return found


def different(rank: int, world: int, options: dict[str, Any], what: str) -> str:
    """The error for ranks that do not do the same."""

    def call() -> None:
        if what == "model":
            torch.manual_seed(0)
            model: nn.Module = Experts(2 + rank)
            optimizer = hetero.HybridAdam(model.parameters())
            hetero.initialize(model, optimizer, BASE | options)
        elif what == "option":
            make("experts", {"chunk_numel": 4096 * 2 * (1 + rank)} | options)
        elif what == "gradient":
            model, optimizer = make("experts", options)
            model(inputs(rank, 0), 0).sum().backward()
            hetero.clip_grad_norm_(model.parameters(), 1.0)
            if rank:
                model.inner.weight.grad = None
            optimizer.step()
        elif what == "load":
            model, optimizer = make("experts", options)
            if rank == 0:
                model.load_state_dict(model.state_dict())

    dist.barrier()  # however long a rank took to start
    return told(call)


def refused_step(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """A step that all ranks refuse, for what makes no sense, and training that goes on."""
    model, optimizer = make("experts", {"rank_timeout_s": 60.0} | options)
    for step in range(2):
        model(inputs(rank, step), 0).square().mean().backward()
        lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], -1.0
        with contextlib.suppress(ValueError):
            optimizer.step()
            raise AssertionError("not refused")
        optimizer.param_groups[0]["lr"] = lr
        model(inputs(rank, step), 0)
        optimizer.step()
        optimizer.zero_grad()
    return finish(model, optimizer)


def tight_use_order(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Layers that are used in the reverse of the order that is expected, at the smallest budget."""

    def build(host_memory: int) -> tuple[nn.Module, hetero.HybridAdam]:
        torch.manual_seed(0)
        model = Layers(12)
        optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
        more = {"host_memory": host_memory, "chunk_numel": 16384, "rank_timeout_s": 60.0}
        return hetero.initialize(model, optimizer, BASE | more | options)

    smallest = smallest_host_memory(lambda: build(1 << 20))
    model, optimizer = build(smallest)
    model.layers = nn.ModuleList(reversed(model.layers))
    for number in range(3):
        train_step(model, optimizer, inputs(rank, number, 128))
    peak = optimizer.engine.ledger.peak_bytes["host"]
    return {"masters": finish(model, optimizer), "peak": peak, "smallest": smallest}


def unequal(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """In the second step the last rank has no data."""
    model, optimizer = make("experts", options)
    for step in range(3):
        if step != 1 or rank < world - 1:
            model(inputs(rank, step), 0).square().mean().backward()
        hetero.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return finish(model, optimizer)


def zeroing(rank: int, world: int, options: dict[str, Any]) -> list[list[torch.Tensor | None]]:
    """Gradients of steps that begin with those of the last one made zero, by their step.

    From the second step on each rank uses an expert of its own, and in the last one the last rank
    has no data.
    """
    model, optimizer = make("experts", options)
    found = []
    for step in range(4):
        if step < 3 or rank < world - 1:
            model(inputs(rank, step), rank if step else 0).square().mean().backward()
        found.append(hetero.grads(model.parameters()))
        optimizer.zero_grad(set_to_none=False)
    optimizer.engine.close()
    return found


def assigned(
    rank: int, world: int, options: dict[str, Any], expert: int
) -> list[torch.Tensor | None]:
    """Gradients that all ranks assign to an expert that rank 1 alone has used."""
    model, optimizer = make("experts", options)
    model(inputs(rank, 0), expert * rank).square().mean().backward()
    params = list(model.experts[expert].parameters())
    for param in params:
        param.grad = torch.full_like(param, 1.0 + 2 * rank)
    found = hetero.grads(params)
    optimizer.engine.close()
    return found


def assigned_after_unequal(
    rank: int, world: int, options: dict[str, Any], calls: Sequence[int]
) -> list[torch.Tensor | None] | str:
    """Gradients that are assigned where rank r has made `calls[r]` backward calls.

    Or the error that refuses them.
    """
    model, optimizer = make("experts", options)
    try:
        for micro in range(calls[rank]):
            model(inputs(rank, micro), rank).square().mean().backward()
        for param in model.parameters():
            param.grad = torch.full_like(param, 1.0 + 2 * rank)
        return hetero.grads(model.parameters())
    except hetero.HeteroError as error:
        return str(error)
    finally:
        optimizer.engine.close()


def assigned_beside_backward(
    rank: int, world: int, options: dict[str, Any], calls: int
) -> list[torch.Tensor | None]:
    """Gradients of an expert to which rank 0 assigns one, and that rank 1 alone then uses.

    Before they are read, other parameters' are.
    """
    model, optimizer = make("experts", options)
    params = list(model.experts[1].parameters())
    if rank == 0:
        for param in params:
            param.grad = torch.full_like(param, 3.0)
    for micro in range(calls):
        model(inputs(rank, micro), rank).square().mean().backward()
    hetero.grads(model.inner.parameters())
    found = hetero.grads(params)
    optimizer.engine.close()
    return found


def assigned_before_scaled(
    rank: int, world: int, options: dict[str, Any]
) -> list[torch.Tensor | None]:
    """Gradients that were assigned before a backward in fp16, on each rank but the last one."""
    model, optimizer = make("experts", {"dtype": "fp16", "initial_loss_scale": 256.0} | options)
    if rank < world - 1:
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
    x = inputs(rank, 0).half()
    with hetero.no_sync(model):
        optimizer.backward(model(x, rank).float().square().mean())
    optimizer.backward(model(x, rank).float().square().mean())
    found = hetero.grads(model.parameters())
    optimizer.engine.close()
    return found


def at_smallest(
    rank: int,
    world: int,
    numels: list[int],
    frozen: set[int],
    options: dict[str, Any],
    viewed: Collection[int] = (),
) -> Any:
    """Flat parameters at the smallest budget: what it is, the peak, and values.

    There are views of those that are `viewed`.
    """

    def build(host_memory: int) -> tuple[nn.ParameterList, hetero.HybridAdam]:
        model = nn.ParameterList(torch.arange(float(numel)) for numel in numels)
        for index in frozen:
            model[index].requires_grad_(False)
        model.views = [model[index].data for index in viewed]
        more = {"host_memory": host_memory, "rank_timeout_s": 60.0}
        return hetero.initialize(model, hetero.HybridAdam(model.parameters()), **options, **more)

    # With room for one parameter (or all, if some stay) it is built, and refused when it is placed.
    first = 4 * (sum(numels) if viewed else max(numels))
    smallest = smallest_host_memory(lambda: build(first))
    model, optimizer = build(smallest)
    peak = optimizer.engine.ledger.peak_bytes["host"]
    return smallest, peak, finish(model, optimizer)
