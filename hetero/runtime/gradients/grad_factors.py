"""Norms of gradients, and the factors that clipping and unscaling give them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from hetero.chunk_groups.shared import Shared
from hetero.ranks.communicator import Communicator
from hetero.runtime.gradients.grad_intake import GradIntake
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.state.grads import Grads
from hetero.state.managed_param import ManagedParam
from offload.errors import HeteroError, NonFiniteError

_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_

Members = Sequence[ManagedParam]


class GradFactors:
    """What may be done to gradients between backward and step().

    A parameter's gradient is what its chunk group keeps times `ManagedParam.grad_factor`. Scaling a
    gradient changes the factor only: the update multiplies by it in fp32. The factor belongs to
    that gradient, so it ends when `.grad` is cleared. Before another micro-batch is added, the
    gradient that is kept is multiplied by it in the grad dtype, as torch does at once.

    With several ranks all must make the same calls: norms are of means over the ranks, whole.
    """

    def __init__(
        self,
        params: ParamRegistry,
        intake: GradIntake,
        shared: Shared,
        shard: Communicator | None,
        step_left_out: Callable[[], object],
    ) -> None:
        """`shard`: the ranks that share gradients, if there are several. `step_left_out` is called
        when a GradScaler is about to leave out a step, before the recordings of the order of uses
        end.
        """
        self._params = params
        self._intake = intake
        self._loss_scale = shared.loss_scale
        self._shard = shard
        self._step_left_out = step_left_out
        # With several ranks: sums of squares of whole gradients, the same on all ranks, and after
        # how many changes of means they were taken.
        self._whole_sums: dict[ManagedParam, float] = {}
        self._sums_at = -1  # GradReducer.changes of all chunk groups when they were taken

    def _grads(self, managed: ManagedParam) -> Grads:
        return self._params.group(managed.chunk).grads

    # Facts, per parameter

    def sums_of_squares(self, members: Members) -> list[float]:
        """Of each gradient, in double, in a fixed order: the same bits for every placement."""
        self._intake.average()
        if self._shard is None:
            return [self._grads(m).sum_of_squares(m) * m.grad_factor**2 for m in members]
        chunk_groups = self._params.chunk_groups
        changes = sum(g.ranks.grad_reducer.changes for g in chunk_groups if g.ranks is not None)
        if changes != self._sums_at:
            self._whole_sums.clear()
            self._sums_at = changes
        if any(m not in self._whole_sums for m in members):
            trained = (m for group in chunk_groups for m in group.members if m.chunk.trainable)
            all_members = [m for m in trained if m.has_grad]
            sums = self._over_ranks([self._grads(m).sum_of_squares(m) for m in all_members])
            self._whole_sums.update(zip(all_members, sums.sum(dim=0).tolist(), strict=True))
        return [self._whole_sums[m] * m.grad_factor**2 for m in members]

    def _over_ranks(self, values: Sequence[float]) -> torch.Tensor:
        """Every rank's values, of which each has its shards', as rows."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self._shard is None:
            return mine.unsqueeze(0)
        return self._shard.all_gather(mine, "the gradients' norms")

    def any_non_finite(self, members: Members) -> bool:
        """Whether an element is infinite or NaN."""
        return not all(map(math.isfinite, self.sums_of_squares(members)))

    def largest(self, members: Members) -> list[float]:
        """The largest magnitude in each gradient; NaN if it has a NaN."""
        self._intake.average()
        over_ranks = self._over_ranks([self._grads(m).largest(m) for m in members])
        largest = over_ranks.amax(dim=0).tolist()
        return [one * abs(m.grad_factor) for one, m in zip(largest, members, strict=True)]

    def read(self, managed: ManagedParam) -> torch.Tensor:
        """A copy of the gradient, as the step will use it: in fp32."""
        self._intake.average()
        mine = self._grads(managed).read(managed)
        shard = self._shard
        if shard is not None:
            layout = self._params.group(managed.chunk).layout
            whole = torch.empty(managed.numel, dtype=mine.dtype)
            parts = [whole[managed.in_shard(layout, rank)[1]] for rank in range(shard.size)]
            shard.exchange([mine] * shard.size, parts, f"reading the gradient of {managed.name}")
            mine = whole
        mine = mine.view(managed.param.shape).to(managed.param.device)
        return mine.float().mul_(managed.grad_factor)

    def norms(self, members: Members, norm_type: float) -> list[float]:
        """The norm of each gradient; `norm_type` is 2 or inf."""
        if norm_type == 2:
            return [math.sqrt(total) for total in self.sums_of_squares(members)]
        assert norm_type == math.inf
        return self.largest(members)

    def total_norm(self, members: Members, norm_type: float = 2.0) -> float:
        """The norm of all of them together; each parameter counts once."""
        members = in_model_order(members)
        if norm_type == 2:
            return math.sqrt(sum(self.sums_of_squares(members)))
        norms = self.norms(members, norm_type)
        return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)

    # Changes

    def clip_norm(
        self, members: Members, max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> float:
        """Makes the total norm at most `max_norm`; returns what it was.

        Raises NonFiniteError (with `error_if_nonfinite`), with nothing changed.
        """
        norm = self.total_norm(members, norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise NonFiniteError(f"the gradient norm is {norm}")
        factor = max_norm / (norm + _CLIP_EPS)
        self.multiply(in_model_order(members), 1.0 if factor > 1 else factor)  # NaN stays NaN
        return norm

    def multiply(self, members: Members, factor: float) -> None:
        """Multiplies each gradient by `factor`."""
        self._intake.average()
        for m in members:
            m.grad_factor *= factor

    def clamp(self, members: Members, low: float | None, high: float | None) -> None:
        """Limits each element to [low, high], in the grad dtype.

        Where the loss is scaled by hetero, a gradient with an overflow stays as it is, because
        its step is going to be skipped.
        """
        self._intake.average()
        if self._loss_scale.dynamic:
            sums = self.sums_of_squares(members)
            members = [m for m, total in zip(members, sums, strict=True) if math.isfinite(total)]
        for m in sorted(members, key=lambda m: (m.chunk.group_index, m.chunk.id, m.slice.offset)):
            if not 0 < m.grad_factor < math.inf:
                factor, m.grad_factor = m.grad_factor, 1.0
                self._change(m, lambda kept, factor=factor: kept.mul_(factor))  # type: ignore[misc]
            # The numbers of the grad dtype nearest to the bounds.
            largest = torch.finfo(self._params.group(m.chunk).dtypes.torch_grad).max
            bounds = [
                None if b is None else min(max(b / m.grad_factor, -largest), largest)
                for b in (low, high)
            ]
            self._change(m, lambda kept, bounds=bounds: kept.clamp_(*bounds))  # type: ignore[misc]

    def unscale(self, members: Members, factor: float) -> bool:
        """GradScaler's: multiplies by `factor`; whether an element is infinite or NaN.

        Raises HeteroError if hetero scales the loss too.
        """
        if self._loss_scale.dynamic:
            raise HeteroError(
                "a GradScaler and hetero both scale the loss (fp16); leave one out: "
                "hetero.initialize(..., initial_loss_scale=None) leaves it to the GradScaler"
            )
        self.multiply(members, factor)
        overflow = self.any_non_finite(members)
        if overflow:  # GradScaler is going to leave out the step, which would say that it is over
            self._step_left_out()
            for chunk_group in self._params.chunk_groups:
                chunk_group.order.end_step()
        return overflow

    def replace(self, managed: ManagedParam, grad: torch.Tensor) -> None:
        """Keeps `grad`, whole, instead of the gradient."""
        self._whole_sums.clear()
        managed.param.grad = grad
        self._intake.adopt([managed])

    def _change(self, m: ManagedParam, change: Callable[[torch.Tensor], object]) -> None:
        self._whole_sums.clear()
        self._grads(m).change(m, change)

    def zero(self, members: Members) -> None:
        """Makes the gradients zero; what comes next is the first of its sum."""
        self._whole_sums.clear()
        self._intake.zero(members)


def in_model_order(members: Members) -> list[ManagedParam]:
    """Each of them once, in the model's order, in which sums are taken."""
    return sorted(dict.fromkeys(members), key=lambda m: m.slice.param.index)
