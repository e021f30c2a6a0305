"""Overlapped updates and reading ahead, in any training on any ranks: not a bit differs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.planning.placement import PlacementError
from offload.errors import BudgetError
from tests.support.ranks.processes import RankPool
from tests.support.training.overlap_net import WIDTH, Block
from tests.support.training.plain_adam import Master, update_all

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-6}
AMPLE_BYTES = {"host_memory": 2 << 20, "device_memory": 1 << 20}


@dataclass(frozen=True)
class Model:
    """`uses` are (block, how it is run): the same one may come several times."""

    blocks: int
    uses: tuple[tuple[int, str], ...]
    tied: bool
    frozen: frozenset[int]


@dataclass(frozen=True)
class Step:
    """A step's micro-batches, each of which may leave out the uses from one on."""

    micro_batches: tuple[int, ...]
    left_out: bool  # a backward before, whose gradients are cleared
    told: bool  # no_sync() around all micro-batches but the last
    clip: float  # to this norm; 0: not
    between: str  # what is done before step()
    clear: str  # gradients "after" step(), "before" the next forward or "late", after it; or not
    overflow: bool  # with a GradScaler: gradients are infinite


@dataclass(frozen=True)
class Loop:
    """Steps, and what goes through all of them."""

    steps: tuple[Step, ...]
    scaler: bool  # a GradScaler
    decays: bool  # the learning rate, by a scheduler


class AnyNet(nn.Module):
    """What a Model says."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(model.blocks))
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)
        if model.tied:
            self.outer.weight = self.inner.weight
        for index in model.frozen:
            self.blocks[index % model.blocks].requires_grad_(False)
        self.uses = model.uses
        self.end = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for index, how in self.uses[: self.end or None]:
            block = self.blocks[index % len(self.blocks)]
            if how == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=how == "reentrant")
        return self.outer(x)


class Trainer(Protocol):
    """What trains, and what it does in its own way."""

    model: AnyNet
    optimizer: torch.optim.Optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        """Around a backward that is not the step's last."""

    def between(self, what: str) -> None:
        """Does what a loop may do between backward and step(), by its name."""

    def clip(self, norm: float, unscaled_by: float) -> None:
        """Clips gradients, which were divided by `unscaled_by`, to `norm`; 0: not."""


def run(trainer: Trainer, loop: Loop, rank: int) -> list[float]:
    """Trains on the rank's own data. Returns its losses."""
    model, optimizer = trainer.model, trainer.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=loop.scaler)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) if loop.decays else None
    losses = []
    clear = ""
    for number, step in enumerate(loop.steps):
        if clear == "before":
            optimizer.zero_grad()
        if step.left_out:
            with trainer.no_sync():
                scaler.scale(_loss_of(model, rank, 500 + number)).backward()
            optimizer.zero_grad()
        for index, end in enumerate(step.micro_batches):
            more = step.told and index + 1 < len(step.micro_batches)
            with trainer.no_sync() if more else nullcontext():
                model.end = end
                loss = _loss_of(model, rank, 10 * number + index)
                losses.append(loss.item())
                if clear == "late" and index == 0:
                    optimizer.zero_grad()
                overflow = step.overflow and loop.scaler
                scaler.scale(loss * float("inf") if overflow else loss).backward()
        model.end = 0
        trainer.between(step.between)
        scaler.unscale_(optimizer)
        trainer.clip(step.clip, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        clear = step.clear
        if clear == "after":
            optimizer.zero_grad()
    return losses


def _loss_of(model: nn.Module, rank: int, seed: int) -> torch.Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + seed))
    loss: torch.Tensor = (model(x).float() - 1).square().mean()
    return loss


@dataclass(frozen=True)
class Where:
    """Where state lives. `budgets` are percents of the way from the smallest budget of each name
    that works to one with room for all."""

    policy: str
    emulated: bool
    budgets: tuple[tuple[str, int], ...]
    chunk_numel: int
    dtype: str
    mixed: bool  # norms in fp32, a chunk group of their own
    prefetch: bool
    overlap: str
    stage: int

    def options(self, path: str) -> dict[str, Any]:
        """All but budgets, for hetero.ZeroInitContext."""
        options: dict[str, Any] = {
            "placement_policy": self.policy,
            "chunk_numel": self.chunk_numel,
            "dtype": self.dtype,
            "debug": {"prefetch": self.prefetch, "overlap_updates": self.overlap},
            "zero_stage": self.stage,
            "initial_loss_scale": None,
            "rank_timeout_s": 100.0,
        }
        if self.mixed:
            options["keep_fp32"] = ["*norm*"]
        if self.emulated:
            options["backend"] = "emulated"
            options["debug"]["link_gbps"] = 4.0
        if self.policy != "cpu":
            options["nvme_path"] = path
        return options


class Hetero:
    """Trains by hetero."""

    def __init__(self, model: Model, options: dict[str, Any]) -> None:
        """With `options` for hetero.ZeroInitContext. Raises PlacementError."""
        self._options = options
        torch.manual_seed(0)
        with hetero.ZeroInitContext(options):
            made = AnyNet(model)
        optimizer = hetero.HybridAdam(made.parameters(), **OPTIONS)
        self.model, self.optimizer = hetero.initialize(made, optimizer)
        self.engine = self.optimizer.engine
        # By step and parameter, what step() multiplied gradients by.
        self.factors: list[list[float]] = []

    def no_sync(self) -> AbstractContextManager[None]:
        """With several ranks it keeps whole gradients, which a small budget has no room for."""
        if dist.is_initialized() and "host_memory" in self._options:
            return nullcontext()
        return hetero.no_sync(self.model)

    def clip(self, norm: float, unscaled_by: float) -> None:
        if norm:
            hetero.clip_grad_norm_(self.model.parameters(), norm)
        self.factors.append([self.engine.find(p).grad_factor for p in trained(self.model)])

    def between(self, what: str) -> None:
        if what == "read":
            assert not any(p.isnan().any() for p in self.model.parameters())
        elif what == "save":
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        elif what == "scale":
            for p in trained(self.model)[::2]:
                if p.grad is not None:
                    p.grad.mul_(0.25)
        elif what.endswith("%"):
            self._set_budgets(int(what.removesuffix("%")))
        else:
            change(self.model, self.optimizer, what)

    def _set_budgets(self, percent: int) -> None:
        """Those that the engine has already. Too small ones are refused, which changes nothing."""
        budgets = {
            name: ample * percent // 100
            for name, ample in AMPLE_BYTES.items()
            if name in self._options
        }
        if budgets:
            self.engine.steps.grad_intake.average(
                force=True
            )  # while ranks wait for means, homes stay
            with suppress(BudgetError):
                self.engine.set_budget(**budgets)

    def result(self) -> dict[str, torch.Tensor]:
        """All that training has made, by name."""
        states = self.optimizer.state_dict()["state"]
        return named(self.model.state_dict(), *states.values())


class Plain:
    """Trains by torch, in fp32 on one rank; the update is hetero's, as documented."""

    def __init__(self, model: Model, factors: list[list[float]]) -> None:
        """`factors` are those of Hetero, whose norms are the same sums in another order."""
        torch.manual_seed(0)
        self.model = AnyNet(model)
        self.optimizer = PlainOptimizer(trained(self.model))
        self._factors = iter(factors)
        self._assigned: nn.Parameter | None = None  # whose gradient the loop has assigned

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def clip(self, norm: float, unscaled_by: float) -> None:
        params = trained(self.model)
        for p, factor in zip(params, next(self._factors), strict=True):
            if p.grad is not None:
                # (Hetero's factor unscales what backward gave, and not what was assigned.)
                p.grad.mul_(factor if p is self._assigned else factor * unscaled_by)
        self._assigned = None
        found = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]).item()
        assert not norm or not found > 1.00001 * norm

    def between(self, what: str) -> None:
        change(self.model, self.optimizer, what)
        if what == "grad":
            self._assigned = trained(self.model)[-1]

    def result(self) -> dict[str, torch.Tensor]:
        masters = self.optimizer.masters
        states = [master.state | {"master": p.detach()} for p, master in masters.items()]
        return named(self.model.state_dict(), *states)


class PlainOptimizer(torch.optim.Optimizer):
    """The documented AdamW, with one param group."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, OPTIONS)
        self.masters = {p: Master(p) for p in params}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        for param, master in self.masters.items():
            if param.grad is not None:
                master.write(param)  # which the loop may have written to
        update_all(self.masters, **{name: group[name] for name in OPTIONS})


def named(values: dict[str, Any], *states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters, and by number the optimizer states of those that were updated."""
    updated = enumerate(s for s in states if s["step"] > 0)
    return values | {f"{n}.{name}": t for n, s in updated for name, t in s.items()}


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [p for p in model.parameters() if p.requires_grad]


def change(model: AnyNet, optimizer: torch.optim.Optimizer, what: str) -> None:
    """What is done in the same way to any model; nothing for other names."""
    params = trained(model)
    if what == "evaluate":
        with torch.no_grad():
            model(torch.ones(1, model.inner.in_features))
    elif what == "write":
        with torch.no_grad():
            params[0].mul_(0.5)
    elif what == "lr":
        optimizer.param_groups[0]["lr"] *= 0.5
    elif what == "grad":
        params[-1].grad = torch.ones_like(params[-1])
    elif what == "clear" and len(params) > 1:
        params[-1].grad = None


def differences(rank: int, world: int, model: Model, loop: Loop, where: Where) -> list[str]:
    """Trains with updates at step() and as `where` says. On one rank in fp32, if each step clears
    gradients, by torch, too.

    Returns what differs. Runs on each rank.
    """
    with TemporaryDirectory() as folder:
        options = where.options(folder)
        options |= _budgets(model, options, dict(where.budgets), world)
        found: list[dict[str, torch.Tensor]] = []
        for overlap in ("none", where.overlap):
            debug = options["debug"] | {"overlap_updates": overlap}
            one = Hetero(model, options | {"debug": debug})
            losses = torch.tensor(run(one, loop, rank))
            found.append(one.result() | {"losses": losses})
            one.engine.close()
            factors = one.factors
            del one
        # (Factors are of what is kept since gradients were cleared.)
        clears = all(step.clear for step in loop.steps)
        if world == 1 and where.dtype == "fp32" and clears:
            plain = Plain(model, factors)
            losses = torch.tensor(run(plain, loop, rank))
            found.append(plain.result() | {"losses": losses})
    wanted, *others = found
    return [
        f"{name} of {way}"
        for way, other in zip((where.overlap, "torch"), others, strict=False)
        for name in wanted.keys() | other.keys()
        if name not in wanted or name not in other or not torch.equal(wanted[name], other[name])
    ]


def _budgets(
    model: Model, options: dict[str, Any], percents: dict[str, int], world: int
) -> dict[str, int]:
    """The budgets in bytes, those of the device first, which RAM then depends on."""
    given: dict[str, int] = {}
    for name in ("device_memory", "host_memory"):
        if name in percents:
            least = torch.tensor(_least(model, options | given, name))
            if world > 1:
                dist.all_reduce(least, dist.ReduceOp.MAX)
            above = max(0, AMPLE_BYTES[name] - int(least))
            given[name] = int(least) + above * percents[name] // 100
    return given


def _least(model: Model, options: dict[str, Any], name: str) -> int:
    """The smallest budget of that name that works, as the refusal of a smaller one names it."""
    least = 192 << 10 if name == "host_memory" else 1
    try:
        Hetero(model, options | {name: least}).engine.close()
    except PlacementError as error:
        device = name == "device_memory"
        least = error.smallest_device_bytes if device else error.smallest_host_bytes
        error.__traceback__ = None
    gc.collect()  # (a model that was refused gives up its file with the garbage)
    return least


HOW = st.sampled_from(["plain", "plain", "reentrant", "non-reentrant"])
MODELS = st.builds(
    Model,
    st.integers(3, 6),
    st.lists(st.tuples(st.integers(0, 5), HOW), min_size=1, max_size=6).map(tuple),
    st.booleans(),
    st.frozensets(st.integers(0, 5), max_size=2),
)
# (Percents are budgets, of ample ones.)
BETWEEN = ["read", "evaluate", "lr", "grad", "scale", "clear", "save", "20%", "60%"]
ALONE = ["write"]  # is refused with several ranks
CLIPS, CLIPS_NOT = 0.1, 1e6


def one_in(count: int) -> st.SearchStrategy[bool]:
    return st.sampled_from([False] * (count - 1) + [True])


@st.composite
def loops(draw: st.DrawFn, ranks: int) -> Loop:
    """Clipped is a share of the steps from none to all. Most have the same micro-batches: only
    then is it known in backward which gradients are final."""
    share = draw(st.sampled_from([0, 0, 25, 50, 75, 100]))
    clip = st.integers(0, 99).map(lambda number: CLIPS if number < share else CLIPS_NOT)
    micro_batches = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
    usual = st.just(draw(micro_batches))
    between = st.sampled_from(BETWEEN if ranks > 1 else BETWEEN + ALONE)
    step = st.builds(
        Step,
        micro_batches=st.one_of(usual, usual, usual, micro_batches),
        left_out=one_in(5),
        told=st.booleans(),
        clip=st.one_of(clip, clip, st.just(0.0)) if share < 100 else clip,
        between=st.one_of(st.just(""), st.just(""), st.just(""), between),
        clear=st.sampled_from(["after", "after", "after", "before", "late", ""]),
        overflow=one_in(10),
    )
    steps = draw(st.lists(step, min_size=3, max_size=6))
    return Loop(tuple(steps), draw(st.booleans()), draw(st.booleans()))


@st.composite
def places(draw: st.DrawFn, ranks: int, loop: Loop) -> Where:
    """Budgets are from the smallest that work to ample ones. fp16 is never without a GradScaler,
    which refuses gradients in fp16 that the loop has assigned, as it does torch's."""
    policy = draw(st.sampled_from(["cpu", "nvme", "nvme", "nvme", "auto"]))
    emulated = draw(st.booleans())
    percent = st.sampled_from([0, 0, 0, 5, 10, 20, 50, 100])
    fp16 = loop.scaler and all(step.between != "grad" for step in loop.steps)
    budgets = {}
    if policy != "cpu":
        budgets["host_memory"] = draw(percent)
    if emulated:
        budgets["device_memory"] = draw(percent)
    return Where(
        policy=policy,
        emulated=emulated,
        budgets=tuple(budgets.items()),
        chunk_numel=draw(st.sampled_from([4096, 4096, 8192, 16384])),
        dtype=draw(st.sampled_from(["bf16", "fp32", "fp16"] if fp16 else ["bf16", "fp32"])),
        mixed=draw(st.booleans()),
        prefetch=draw(st.booleans()),
        overlap=draw(st.sampled_from(["auto", "forward", "backward", "backward", "both", "both"])),
        stage=draw(st.integers(1, 3)) if ranks > 1 else 3,
    )


@st.composite
def trainings(draw: st.DrawFn) -> tuple[int, Model, Loop, Where]:
    """The number of ranks comes first. More than one take longer, so most examples have one."""
    ranks = draw(st.sampled_from([1, 1, 1, 1, 1, 1, 2, 2, 3]))
    loop = draw(loops(ranks))
    return ranks, draw(MODELS), loop, draw(places(ranks, loop))


@pytest.fixture(scope="module")
def pools(ranks_of: Callable[[int], RankPool]) -> dict[int, RankPool]:
    """Ranks that stay up for all examples, by their number."""
    return {2: ranks_of(2), 3: ranks_of(3)}


def found_by(
    pools: Mapping[int, RankPool], ranks: int, model: Model, loop: Loop, where: Where
) -> list[str]:
    """What differs on any rank."""
    if ranks == 1:
        return differences(0, 1, model, loop, where)
    return [one for found in pools[ranks].run(differences, model, loop, where) for one in found]


# Gradients that are cleared after one rank has sent them and others, whose device was slower, not.
CLEARED = (
    3,
    Model(3, ((5, "plain"), (4, "plain"), (4, "reentrant"), (2, "plain")), True, frozenset([1, 3])),
    Loop(
        (
            Step((1,), False, False, 0.0, "", "before", False),
            Step((1, 5, 0), True, True, 0.1, "60%", "before", False),
            Step((1, 5, 0), True, True, 0.0, "", "late", False),
            Step((5, 3, 4), False, False, 0.0, "", "before", False),
            Step((1, 5, 0), False, False, 0.0, "", "after", False),
        ),
        scaler=True,
        decays=False,
    ),
    Where(
        policy="nvme",
        emulated=True,
        budgets=(("host_memory", 0), ("device_memory", 20)),
        chunk_numel=16384,
        dtype="bf16",
        mixed=False,
        prefetch=True,
        overlap="both",
        stage=2,
    ),
)


# A mean of the first micro-batch arrives in the backward of a second one that no step had before.
LATE_MEAN = (
    3,
    Model(4, tuple((index, "plain") for index in (1, 1, 3, 0, 0, 3)), False, frozenset()),
    Loop(
        (
            Step((4,), True, False, 0.0, "", "after", False),
            Step((5, 2), True, False, 1e6, "", "", False),
        ),
        scaler=False,
        decays=False,
    ),
    Where(
        policy="nvme",
        emulated=False,
        budgets=(("host_memory", 0),),
        chunk_numel=16384,
        dtype="fp32",
        mixed=False,
        prefetch=False,
        overlap="backward",
        stage=2,
    ),
)


@settings(max_examples=4)
@example(CLEARED)
@example(LATE_MEAN)
@given(training=trainings())
def test_any_training(pools: dict[int, RankPool], training: tuple[int, Model, Loop, Where]) -> None:
    assert not found_by(pools, *training)


@pytest.mark.extra
@pytest.mark.slow
@settings(max_examples=1000)
@given(training=trainings())
def test_many_trainings(
    pools: dict[int, RankPool], training: tuple[int, Model, Loop, Where]
) -> None:
    """As above, for some ten minutes."""
    assert not found_by(pools, *training)
