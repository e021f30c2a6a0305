"""A model of nothing but parameters, whose optimizer step is what a model of that size would do.

It goes through hetero.initialize(): layout, placement, buffers and the tasks are the product's.
Gradients are made once and stay, as they would between steps without zero_grad().
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import ceil

import torch

import hetero
from hetero.chunks.layout import Layout, ParamSpec, search_slot_numel
from hetero.config import Config
from hetero.planning.group_plans import Arrangement, arrange
from offload.memory.sizes import format_bytes, round_up
from offload.memory.tiers import Account, Tier

# As large as the matrices of a model; smaller in a small model, so that it has many.
LARGEST_PARAM_NUMEL = 4 << 20
LEAST_PARAMS = 128

RESIDENT_BYTES = 4  # a bf16 parameter and its bf16 gradient, which are in RAM
UPDATE_BYTES = 26  # read and written in RAM per parameter by the bf16 update: 12 states and their
# remainder there and back, the parameter there and back, the gradient there
# At least so many optimizer states, for steps that the curve's picture does not show.
CURVE_OPTIM_STATES = 48


class Parameters(torch.nn.Module):
    """`numel` parameters, rounded up to whole tensors of one size."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        each, count = tensor_shape(numel)
        # Any bits do; moderate numbers keep the update free of denormals, which are slow.
        values = torch.linspace(-1, 1, each)
        self.tensors = torch.nn.ParameterList(
            torch.nn.Parameter(values.clone()) for _ in range(count)
        )


def tensor_shape(numel: int) -> tuple[int, int]:
    """(elements of a tensor, tensors) for a model of about `numel` parameters."""
    each = min(LARGEST_PARAM_NUMEL, round_up(ceil(numel / LEAST_PARAMS), 4096))
    return each, ceil(numel / each)


def curve_chunk_numel(numel: int) -> int:
    """A chunk size that cuts a model of `numel` parameters into CURVE_OPTIM_STATES or more."""
    each, count = tensor_shape(numel)
    specs = [ParamSpec(i, str(i), each, True) for i in range(count)]
    return search_slot_numel(specs, max(each, each * count // CURVE_OPTIM_STATES))


@dataclass(frozen=True)
class Plan:
    """Chunks and buffers of a model under a budget for buffers; nothing is taken yet."""

    config: Config
    arrangement: Arrangement

    @property
    def layout(self) -> Layout:
        """Of the only chunk group."""
        return self.arrangement.chunk_groups[0].layout

    @property
    def optim_state_bytes(self) -> int:
        """Of one optimizer state, which is also what a buffer has."""
        return self.config.dtypes.optim_state_bytes(self.layout.slot_numel)

    @property
    def optim_states(self) -> int:
        """All of them, in buffers or not."""
        return self.layout.slot_count

    @property
    def buffers(self) -> int:
        """Of an optimizer state each."""
        return self.arrangement.chunk_groups[0].placement.buffers

    @property
    def resident_bytes(self) -> int:
        """Parameters and gradients, padding included."""
        return self.layout.slot_count * self.layout.slot_numel * RESIDENT_BYTES

    @property
    def streamed_bytes(self) -> int:
        """What theory says a step moves: each optimizer state that no buffer keeps, twice."""
        return 2 * (self.optim_states - self.buffers) * self.optim_state_bytes


def make_plan(numel: int, buffer_budget: int, directory: str, chunk_numel: int | None) -> Plan:
    """How hetero arranges the model when `buffer_budget` bytes are left for buffers.

    host_memory is this plus the bytes of parameters and gradients. Raises ValueError or BudgetError
    when the budget is too small.
    """
    with torch.device("meta"):
        model = Parameters(numel)
    resident = sum(p.numel() for p in model.parameters()) * RESIDENT_BYTES
    for _ in range(2):  # the second time with the chunks' padding, which the first finds out
        config = Config.make(
            overlap_updates="none",
            placement_policy="nvme",
            host_memory=buffer_budget + resident,
            nvme_path=directory,
            dtype="bf16",
            chunk_numel=chunk_numel,
        )
        arrangement = arrange(
            model, config, config.dtypes, config.host_bytes(), config.disk_bytes()
        )
        plan = Plan(config, arrangement)
        resident, chunk_numel = plan.resident_bytes, plan.layout.slot_numel
    placement = arrangement.chunk_groups[0].placement
    if Tier.DISK in placement.param or Tier.DISK in placement.grad:
        raise ValueError(
            f"--host-memory {format_bytes(buffer_budget)} is less than one optimizer state of"
            f" {format_bytes(plan.optim_state_bytes)}; raise it or lower --chunk-numel"
            f" (now {chunk_numel})"
        )
    return plan


class HeteroStep:
    """The optimizer step of a model with this plan. A context manager."""

    def __init__(self, numel: int, plan: Plan) -> None:
        self.plan = plan
        with hetero.ZeroInitContext(plan.config):
            model = Parameters(numel)
        self.params = sum(p.numel() for p in model.parameters())
        optimizer = hetero.HybridAdam(model.parameters(), lr=1e-4, weight_decay=0.01)
        self._model, self._optimizer = hetero.initialize(model, optimizer)
        self._engine = self._optimizer.engine
        for param in self._model.parameters():
            grad = torch.linspace(-0.01, 0.01, param.numel(), dtype=param.dtype)
            torch.autograd.backward([param], [grad.view_as(param)])

    def __enter__(self) -> HeteroStep:
        return self

    def __exit__(self, *_: object) -> None:
        """Frees memory and file."""
        self._engine.close()

    @property
    def io_engine(self) -> str:
        """Of the file; "io_uring" or "threads"."""
        assert self._engine.io_engine is not None
        return self._engine.io_engine

    @property
    def notes(self) -> list[str]:
        return list(self._engine.notes)

    @property
    def peak_managed_bytes(self) -> int:
        """The most that was in RAM beside parameters and gradients, which are accounted first."""
        ledger = self._engine.ledger
        resident = sum(ledger.used(Tier.HOST, a) for a in (Account.PARAM, Account.GRAD))
        return ledger.peak_bytes[Tier.HOST.value] - resident

    def sample(self, steps: int) -> dict[str, float]:
        """Means of `steps` steps in a row, the last one's writes included; bytes are exact."""
        before = self._moved()
        begin_s = time.perf_counter()
        for _ in range(steps):
            self._optimizer.step()
        self._engine.synchronize()
        seconds, after = time.perf_counter() - begin_s, self._moved()
        moved = {name: (after[name] - before[name]) / steps for name in after}
        return {"step_s": seconds / steps, **moved}

    def _moved(self) -> dict[str, float]:
        """Bytes, and seconds of the pipeline, so far."""
        traffic, stats = self._engine.traffic, self._engine.chunk_groups[0].pipeline.stats
        timers = {name: stats[name] for name in ("compute_s", "read_wait_s", "write_wait_s")}
        return {"read_bytes": traffic.disk_read, "written_bytes": traffic.disk_write, **timers}
