"""From a plan to what averages a chunk group's gradients over the ranks, and the memory for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hetero.chunk_groups.shared import Shared
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import SlotBytes
from hetero.ranks.device_group import DeviceGroup
from hetero.ranks.peers import Channel
from hetero.ranks.process_groups import ProcessGroups
from hetero.state.grads import Grads
from hetero.state.managed_param import ManagedParam
from hetero.state.reduction.device_means import DeviceMeans, MeanMemory
from hetero.state.reduction.grad_buckets import ReduceBuffers
from hetero.state.reduction.grad_reduce import GradReducer
from offload.device.cuda_backend import CudaBackend
from offload.device.grad_offload import GradOffload
from offload.memory.arena import HostArena
from offload.memory.slot_pool import DevicePool, SlotPool
from offload.memory.tiers import Account


@dataclass
class GradReducerBuilder:
    """Makes one chunk group's reducer; `resources` close what belongs to it."""

    plan: ChunkGroupPlan
    shared: Shared
    world: ProcessGroups
    resources: ExitStack

    def build(
        self, grads: Grads, trained: Sequence[ManagedParam], grad_offload: GradOffload | None
    ) -> GradReducer:
        """The reducer in front of `grads`, which are of the `trained` parameters.

        `grad_offload` brings gradients from a DEVICE to RAM. All ranks must call it. Raises
        BudgetError, and PeerError.
        """
        layout, placement = self.plan.layout, self.plan.placement
        bucket_bytes = SlotBytes.of(layout, self.plan.dtypes).bucket

        def arena(slots: int, nbytes: int = bucket_bytes) -> HostArena:
            # (Gradients come to buckets from the device.)
            made = self.shared.backend.host_arena(slots, nbytes, self.shared.ledger, Account.BUCKET)
            self.resources.callback(made.close)  # also if there is no room for its slots
            return made

        by_backend = self.shared.config.debugging.grad_reduce == "backend"
        dtype, received = self.plan.dtypes.torch_reduce, placement.receive_slots
        if self.plan.spec.averages_on_device and placement.longest_trained:
            device_buckets: DevicePool | None = None
            in_ram: HostArena | None = None
            if layout.shard.grads:
                grad_offload = None
                device_buckets = DevicePool(self._device_buckets, placement.bucket_slots)
                in_ram = arena(received, bucket_bytes // layout.shard.ranks)
                in_ram.commit(0, received)
            buffers = ReduceBuffers(
                dtype,
                device_buckets,
                DevicePool(self._device_buckets, received),
                None,
                device=self._make_device_means(grads, in_ram, by_backend),
            )
        else:
            between_replicas: HostArena | None = None
            if self.world.replicas is not None and placement.longest_trained:
                between_replicas = arena(
                    placement.longest_trained, bucket_bytes // layout.shard.ranks
                )
                between_replicas.commit(0, placement.longest_trained)
            buckets: SlotPool | None = None
            if layout.shard.grads:
                trained_slots = sum(c.slots for c in layout.chunks if c.trainable)
                slots = placement.bucket_slots
                buckets = SlotPool(arena(max(trained_slots, slots)), slots)
            pool = SlotPool(arena(received), received)
            buffers = ReduceBuffers(dtype, buckets, pool, between_replicas, by_backend)
        grad_reducer = GradReducer(
            layout,
            trained,
            self.world,
            buffers,
            grads,
            self.shared.loss_scale,
            grad_offload,
        )
        if self.plan.spec.reduce_at_end:
            self.resources.enter_context(grad_reducer.no_sync())
        return grad_reducer

    def _device_buckets(self, slots: int, shards: bool = False) -> HostArena:
        """Slots of the device for whole gradients, or for this rank's `shards` of them."""
        nbytes = SlotBytes.of(self.plan.layout, self.plan.dtypes).bucket
        if shards:
            nbytes //= self.plan.layout.shard.ranks
        made = self.shared.backend.arena(slots, nbytes, self.shared.ledger, Account.BUCKET)
        self.resources.callback(made.close)
        return made

    def _make_device_means(
        self, grads: Grads, in_ram: HostArena | None, by_backend: bool
    ) -> DeviceMeans:
        assert isinstance(self.shared.backend, CudaBackend)
        assert self.world.everyone is not None
        shard, replicas = self.world.shard, self.world.replicas
        group = DeviceGroup(
            self.world.everyone, Channel.GRADIENTS, self.shared.backend, shard, replicas
        )
        self.resources.callback(group.close)
        longest, dtype = self.plan.placement.longest_trained, self.plan.dtypes.torch_reduce
        between: torch.Tensor | None = None
        if replicas is not None:
            between = self._device_buckets(longest, shards=True).view(0, longest, dtype)
        spare = self._device_buckets(longest).view(0, longest, dtype)
        means = DeviceMeans(
            self.world,
            group,
            self.shared.backend,
            grads.homes,
            self.plan.layout.shard,
            MeanMemory(spare, in_ram, between),
            by_backend,
        )
        self.resources.callback(means.close)
        return means
