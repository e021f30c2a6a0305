"""One set of parameters of one compute dtype, and all that keeps, moves and updates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from hetero.chunk_groups.movable import Movable
from hetero.chunk_groups.update_tasks import Stepper
from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import Placement, SlotBytes
from hetero.ranks.process_groups import World
from hetero.ranks.shard_server import Kind, ShardServer, Versions
from hetero.state.all_gather import Gathering
from hetero.state.grad_reduce import Buckets
from hetero.state.grads import Grads
from hetero.state.managed_param import ManagedParam
from hetero.state.optimizer_state import OptimState, OptimStates
from hetero.state.params import Params
from hetero.state.scratch_space import DiskParts
from offload._native import StepPipeline
from offload.cache.use_order import UseOrder


@dataclass
class RankParts:
    """What exists only with several ranks; only of shards, if the ranks share any."""

    buckets: Buckets
    server: ShardServer | None
    gathering: Gathering | None
    versions: Versions


@dataclass(eq=False)
class ChunkGroup:
    """Parameters that are laid out together, and their homes, pools, file and connections.

    An engine has one; another for parameters that stay in fp32; and one for each set of parameters
    that came later. They share nothing but the ledger: chunk ids, slots and messages are a chunk
    group's own.
    """

    members: Sequence[ManagedParam]
    layout: Layout
    placement: Placement
    dtypes: Dtypes
    params: Params
    grads: Grads
    optim_states: OptimStates
    stepper: Stepper
    movable: Movable
    min_gathered_slots: int
    world: World
    ranks: RankParts | None
    order: UseOrder
    held: bool  # as BankPlan says
    resources: ExitStack  # closed in the reverse order of their making

    @property
    def pipeline(self) -> StepPipeline:
        """What updates; another one after homes have moved."""
        return self.movable.pools.pipeline

    @property
    def disk(self) -> DiskParts | None:
        """What exists only if something is, or was, homed on DISK."""
        return self.movable.file.parts

    @property
    def wait_s(self) -> float:
        """Seconds for which compute has waited for transfers so far."""
        waited = self.params.wait_s + self.grads.wait_s + self.stepper.wait_s
        return waited if self.ranks is None else waited + self.ranks.buckets.wait_s

    @property
    def add_grad(self) -> Callable[[ManagedParam, torch.Tensor, bool], None]:
        """What takes a gradient that autograd made."""
        return self.grads.add if self.ranks is None else self.ranks.buckets.add

    @property
    def trained_numel(self) -> int:
        """Elements of the parameters that are trained."""
        return sum(m.numel for m in self.members if m.chunk.trainable)

    def when_held(self) -> Placement:
        """Its placement with room for whole gradients until the end of backward."""
        shard, made = self.layout.shard, self.placement
        if self.held or self.ranks is None or not shard.grads:
            return made
        slots = sum(c.slots for c in self.layout.chunks if c.trainable)
        more = max(0, slots - made.bucket_slots)
        more_bytes = more * SlotBytes.of(self.layout, self.dtypes).bucket
        return replace(
            made, bucket_slots=made.bucket_slots + more, host_bytes=made.host_bytes + more_bytes
        )

    def hold(self) -> None:
        """From now on its gradients stay whole until the end of backward; idempotent.

        Raises BudgetError, with nothing changed.
        """
        if not self.held:
            placement = self.when_held()
            if self.ranks is not None:
                self.ranks.buckets.reserve(placement.bucket_slots - self.placement.bucket_slots)
            self.placement, self.held = placement, True
            self.resources.enter_context(self.no_sync())

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients are only added up on each rank."""
        return nullcontext() if self.ranks is None else self.ranks.buckets.no_sync()

    def commit(self) -> None:
        """Charges what of its plan is not charged yet, once its parameters are there.

        From then on what the budget has left is nobody's.
        """
        self.grads.commit()

    def give_up(self, why: str) -> None:
        """Other ranks, which wait for values that will not come, are told why."""
        if self.ranks is not None:
            self.ranks.versions.end(why)

    def leave(self) -> None:
        """Answers other ranks until none asks any more; asks them nothing more."""
        self.params.stop()
        if self.ranks is not None and self.ranks.server is not None:
            self.ranks.server.close()

    def close(self) -> None:
        """Frees memory, file and threads; idempotent."""
        self.params.forget()
        self.resources.close()

    @contextmanager
    def open_optim_state(self, chunk: Chunk, tile: int, rank: int) -> Iterator[OptimState | None]:
        """A tile's optimizer state of any rank's shard, to be read inside the block; None:
        frozen.
        """
        if rank == self.layout.shard.rank or not chunk.trainable:
            with self.optim_states.open(chunk, tile) as optim_state:
                yield optim_state
            return
        assert self.ranks is not None
        assert self.ranks.server is not None
        raw = self.optim_states.empty()
        self.ranks.server.request(Kind.OPTIM_STATE, chunk, tile, rank, raw).wait()
        yield self.optim_states.over(raw)


def manage(
    plan: ChunkGroupPlan, params: Mapping[int, torch.nn.Parameter], device: torch.device
) -> list[ManagedParam]:
    """What is known of the chunk group's parameters, chunk by chunk; `params` by their specs'
    indices.

    Compute happens on `device`.
    """
    return [
        ManagedParam(params[s.param.index], chunk, s, plan.dtypes.torch_compute, device)
        for chunk in plan.layout.chunks
        for s in chunk.slices
    ]
