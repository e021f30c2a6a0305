"""Blocks of an engine's model that are computed again in backward, as its options want."""

from __future__ import annotations

import torch

from hetero.activations.store import ActivationStore
from hetero.chunk_groups.shared import Shared
from hetero.runtime.learned_rates import Counters
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.runtime.modules.saved_tensors import SavedTensors
from hetero.runtime.recompute.block_calls import BlockCalls
from hetero.runtime.recompute.blocks import find_blocks
from hetero.runtime.recompute.policy import RecomputePolicy, SeenStep
from hetero.runtime.step_tracer import MeasuredStep


class Recompute:
    """Has the calls of blocks decided, measured, and chosen anew when steps have shown more."""

    def __init__(
        self,
        model: torch.nn.Module,
        params: ParamRegistry,
        shared: Shared,
        saved_tensors: SavedTensors,
        activations: ActivationStore | None,
    ) -> None:
        """Takes over the calls of the model's blocks until close(), if activations have a budget.

        Raises ValueError if a pattern of the option fits no module, or there is no budget.
        """
        self._calls: BlockCalls | None = None
        mode = shared.config.recompute
        if activations is None and mode not in ("auto", "none"):
            raise ValueError(
                f"recompute={mode!r} computes blocks again in backward only where what autograd "
                f"saves has a budget; also give activation_memory ('auto' is enough)"
            )
        if activations is None or mode == "none":
            return
        self._activations = activations
        self._is_separate = shared.backend.separate
        self._waited = 0.0, 0.0  # by the activations, until the last step's end
        self._moved_bytes = 0  # of activations, likewise
        chunk_groups = params.chunk_groups
        self._policy = RecomputePolicy(mode, activations, chunk_groups[0].world.agree)

        def waits_s() -> float:
            own = activations.counts.pack_s + activations.counts.unpack_s
            return own + sum(chunk_group.wait_s for chunk_group in chunk_groups)

        blocks = find_blocks(model, None if isinstance(mode, str) else mode)
        if blocks:
            self._calls = BlockCalls(
                blocks, params, saved_tensors, activations, self._policy, waits_s, shared.notes
            )

    def close(self) -> None:
        """The blocks are called as before; idempotent."""
        if self._calls is not None:
            self._calls.remove()

    def begin_forward(self) -> None:
        """A forward of the whole model begins in this thread."""
        if self._calls is not None:
            self._calls.begin_forward()

    def end_step(self, made: MeasuredStep | None, moved: Counters) -> None:
        """A step is over, which was `made`, or had no forward; `moved` is what one moves of late.

        Raises PeerError if a rank does not come.
        """
        if self._calls is None:
            return
        self._calls.end_step()
        self._activations.recomputes = any(self._calls.latest.recomputed)
        counts = self._activations.counts
        now = counts.pack_s, counts.unpack_s
        packed_s, unpacked_s = (new - old for new, old in zip(now, self._waited, strict=True))
        self._waited = now
        so_far = self._activations.moved_bytes
        moved_bytes = sum(so_far[:2] if self._is_separate else so_far[2:])
        own_bytes, self._moved_bytes = moved_bytes - self._moved_bytes, moved_bytes
        seen = None
        if made is not None:
            seen = SeenStep(
                max(0.0, made.computing.forward_s - packed_s),
                max(0.0, made.computing.backward_s - unpacked_s),
                made.micro_batches,
                moved.h2d_bytes + moved.d2h_bytes if self._is_separate else moved.nvme_bytes,
                moved.h2d_s + moved.d2h_s if self._is_separate else moved.nvme_s,
                own_bytes,
            )
        self._policy.end_step(self._calls.latest, seen)

    def words(self) -> str:
        """For people: what is computed again and why, and what more memory would change; "" if the
        model has no blocks, or none may be computed again."""
        return "" if self._calls is None else self._policy.words(self._calls.latest)
