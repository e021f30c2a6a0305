"""Trains by any loop in any placement on any number of ranks, and compares bits with other ways.

Functions that tests run on ranks; the data that they take is what hypothesis draws.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hetero
from hetero.planning.placement import PlacementError
from offload.errors import BudgetError
from tests.support.overlap.any_loop import AnyNet, Loop, Model, run
from tests.support.training.plain_adam import Master

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-6}
AMPLE_BYTES = {"host_memory": 2 << 20, "device_memory": 1 << 20}


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
            "prefetch": self.prefetch,
            "overlap_updates": self.overlap,
            "zero_stage": self.stage,
            "initial_loss_scale": None,
            "rank_timeout_s": 100.0,
        }
        if self.mixed:
            options["keep_fp32"] = ["*norm*"]
        if self.emulated:
            options |= {"backend": "emulated", "link_gbps": 4.0}
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
        betas = dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        hyper = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        for param, master in self.masters.items():
            if param.grad is not None:
                master.write(param)  # which the loop may have written to
                master.update(param.grad, decoupled=True, **betas, **hyper)
                param.copy_(master.weight)


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
            one = Hetero(model, options | {"overlap_updates": overlap})
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
