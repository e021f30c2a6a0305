"""The engine: one model and one optimizer, run inside the budgets."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetero.buckets import Buckets
from hetero.clipping import Clipping, check_dense
from hetero.dtypes import Dtypes
from hetero.gathering import Gathering
from hetero.grads import Grads
from hetero.hooks import GradHook, ModuleHooks, refuse_use
from hetero.layout import Chunk, Layout
from hetero.managed import ManagedParam
from hetero.params import Params
from hetero.placement import Placement
from hetero.records import Record, Records
from hetero.scaler import LossScale
from hetero.shard_server import Kind, ShardServer
from hetero.steps import HyperOf, Stepper
from hetero.world import World
from offload import _native
from offload._native import IoEngine, StepPipeline
from offload.errors import ClosedError, HeteroError, NonFiniteError, UnmanagedParameterError
from offload.ledger import Ledger
from offload.store import ScratchFile, Transfers


@dataclass(frozen=True)
class Traffic:
    """Bytes moved since the engine was made; disks' being measured does not count."""

    h2d: int
    d2h: int
    disk_read: int
    disk_write: int
    sent: int = 0  # to other ranks: shards of parameters, and of gradients to be averaged
    received: int = 0


@dataclass
class DiskParts:
    """What exists only if something is homed on DISK."""

    io: IoEngine
    scratch: ScratchFile
    transfers: Transfers
    measuring: Mapping[str, int]  # the I/O engine's counters after disks were measured


@dataclass
class RankParts:
    """What exists only with several ranks; only of shards, if the ranks share any."""

    buckets: Buckets
    server: ShardServer | None
    gathering: Gathering | None


class Removable(Protocol):
    """Something that was put on the model."""

    def remove(self) -> None:
        """Takes it off again."""


class Engine:
    """Made by hetero.initialize(); reached as `optimizer.engine`.

    `ledger` has the bytes per tier, `placement` and `layout` what lives where, `traffic` what was
    moved. close() frees everything; the model cannot be used afterwards.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        managed: Sequence[ManagedParam],
        layout: Layout,
        placement: Placement,
        dtypes: Dtypes,
        ledger: Ledger,
        params: Params,
        grads: Grads,
        records: Records,
        stepper: Stepper,
        pipeline: StepPipeline,
        disk: DiskParts | None,
        world: World,
        ranks: RankParts | None,
        resources: ExitStack,
        loss_scale: LossScale,
        notes: list[str],
        end_step: Callable[[], None],
    ) -> None:
        self.layout = layout
        self.placement = placement
        self.dtypes = dtypes
        self.ledger = ledger
        self.loss_scale = loss_scale
        self.notes = notes
        self.params = params
        self.records = records
        self._model = weakref.ref(model)
        self._managed = {id(m.param): m for m in managed}
        self._grads = grads
        self._stepper = stepper
        self._pipeline = pipeline
        self._disk = disk
        self.world = world
        self._ranks = ranks
        self._resources = resources  # closed in the reverse order of their making
        self._end_step = end_step
        self._scaled_backward = False
        self._closed = False
        self.clipping = Clipping(
            grads, loss_scale, layout, world, None if ranks is None else ranks.buckets
        )
        for m in managed:
            m.param._hetero_engine = self  # type: ignore[attr-defined]
            m.param.data = (
                m.part_of(params.flat(m.chunk)) if params.is_resident(m.chunk) else m.absent
            )
            m.note_change()
        trainable = [m for m in managed if m.chunk.trainable]
        for m in trainable:
            grads.add_member(m)
            m.grad_ops = self.clipping
        self._module_hooks = ModuleHooks(model, self._known, params, dtypes.torch_compute)
        self._hooks: list[Removable] = [self._module_hooks]
        self._hooks += [GradHook(m, self._check_grad, self.clipping.keep) for m in trainable]
        # The engine lives as long as the model; without close() it ends with it, or at exit.
        self._finalizer = weakref.finalize(model, self._free)

    def attach(self, hooks: Removable) -> None:
        """Hooks on the model that close() removes."""
        self._hooks.append(hooks)

    def _known(self, param: torch.Tensor) -> ManagedParam | None:
        return self._managed.get(id(param))

    def find(self, param: torch.Tensor) -> ManagedParam:
        """What is known of `param`. Raises UnmanagedParameterError if it is not this engine's."""
        self._check_open()
        managed = self._managed.get(id(param))
        if managed is None:
            raise UnmanagedParameterError(
                f"a parameter of shape {tuple(param.shape)} is not managed by this engine; pass "
                f"the model that owns it through hetero.initialize()"
            )
        return managed

    def find_all(self, params: Iterable[torch.Tensor]) -> list[ManagedParam]:
        """find() for each of `params` that has elements; empty ones need no managing."""
        return [self.find(p) for p in params if p.numel()]

    def name_of(self, param: torch.Tensor) -> str:
        """The parameter's first name in the model."""
        return self.find(param).name

    def share(
        self, values: Mapping[ManagedParam, torch.Tensor], root: int
    ) -> Mapping[ManagedParam, torch.Tensor]:
        """Values that rank `root` of the engine's ranks has for the same parameters."""
        everyone = self.world.everyone
        if not 0 <= root < self.world.size:
            raise ValueError(
                f"modifier_rank must be one of the {self.world.size} ranks, 0 to "
                f"{self.world.size - 1}, not {root}"
            )
        if everyone is None:
            return values
        shared = {managed: value.contiguous() for managed, value in values.items()}
        for managed, value in shared.items():
            everyone.broadcast(value, root, f"changing {managed.name}")
        return shared

    # Gradients

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """loss.backward(**options), with the loss times the loss scale under fp16."""
        self._check_open()
        self._scaled_backward = True
        try:
            (loss.float() * self.loss_scale.value if self.loss_scale.dynamic else loss).backward(
                **options
            )
        finally:
            self._scaled_backward = False

    def _check_grad(self, managed: ManagedParam, grad: torch.Tensor) -> None:
        check_dense(managed, grad)
        if self.loss_scale.dynamic and not self._scaled_backward:
            raise RuntimeError(
                "fp16 needs a scaled loss: call optimizer.backward(loss) instead of "
                "loss.backward(); or scale the loss yourself, with torch.amp.GradScaler say, and "
                "initialize with initial_loss_scale=None"
            )
        self.clipping.adopt([managed])

    def with_grads(self, params: Iterable[torch.Tensor]) -> list[ManagedParam]:
        """Those of `params` that have gradients, after taking in assigned ones."""
        members = [m for m in self.find_all(params) if m.chunk.trainable]
        self.clipping.adopt(members)
        self.clipping.settle()
        return [m for m in members if m.has_grad]

    def grad_norm(self, params: Iterable[torch.Tensor]) -> float:
        """The 2-norm of the parameters' gradients, unscaled, as far as they are clipped by now.

        Summed in double per parameter in a fixed order, then over parameters in the model's order:
        the same bits for every placement and chunk size.
        """
        return self.clipping.total_norm(self.with_grads(params))

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block gradients are added up on each rank and nothing is sent.

        They are kept whole until the first backward outside, within host_memory.
        """
        return nullcontext() if self._ranks is None else self._ranks.buckets.no_sync()

    # Steps

    def step(self, param_groups: Sequence[dict[str, Any]], hyper_of: HyperOf) -> None:
        """One optimizer update of all parameters that have gradients.

        Raises HeteroError, before anything is changed, for what would be lost silently: parameters
        moved or unfrozen after initialize(), a step inside gathered().
        """
        self._check_open()
        self._module_hooks.unwind()
        self.clipping.settle(force=True)
        listed = [(group, self.find_all(group["params"])) for group in param_groups]
        for _, all_members in listed:
            for m in all_members:
                self._check_trainable(m)
        groups = [(group, self.with_grads(group["params"])) for group, _ in listed]
        members = [m for _, some in groups for m in some]
        overflow = self.loss_scale.dynamic and self.clipping.any_non_finite(members)
        self._meet(members)
        if overflow and self.loss_scale.value <= 1:
            raise NonFiniteError(
                "fp16 gradients overflow although the loss scale is down to 1; use dtype='bf16' or "
                "'fp32', whose range is wider"
            )
        if members and not overflow:
            self._check_factors(members)
            self._update(groups, members, hyper_of)
        if members:
            self.loss_scale.update(overflow)
        self._end_step()

    def meet(self, said: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Until all ranks are here, and nobody reads old values any more; what each said."""
        self.params.settle()
        return self.world.all_gather(said, what)

    def _meet(self, members: Sequence[ManagedParam]) -> None:
        """Until all ranks are about to update, and the same `members`."""
        if self.world.everyone is None:
            return
        flags = torch.zeros(len(self._managed), dtype=torch.uint8)
        flags[[m.slice.param.index for m in members]] = 1
        for peer, theirs in enumerate(self.meet(flags, "optimizer.step()")):
            if not torch.equal(theirs, flags):
                index = int((theirs != flags).nonzero()[0])
                raise HeteroError(
                    f"{self.managed_params()[index].name} has a gradient on one of "
                    f"{self.world.name} and {self.world.everyone.name(peer)} only at "
                    f"optimizer.step(); clear gradients, and give the optimizer parameters, on all "
                    f"ranks alike"
                )

    def _update(
        self,
        groups: list[tuple[dict[str, Any], list[ManagedParam]]],
        members: list[ManagedParam],
        hyper_of: HyperOf,
    ) -> None:
        chunks = {m.chunk.id: m.chunk for m in members}
        # Before the update, so that even an interruption leaves no copy of old values in use.
        for chunk in chunks.values():
            self.params.invalidate(chunk)
        try:
            with self.records.lock:
                self._stepper.run(groups, hyper_of)
            self.params.changed(chunks.values())
        except ValueError:  # nothing was changed, and other ranks wait for what they have
            self.params.changed(chunks.values())
            raise
        finally:
            for m in members:
                if self.params.is_resident(m.chunk):
                    # As an in-place update does: a backward over older values then fails.
                    torch.autograd.graph.increment_version(m.param)
                m.note_change()
            for chunk in chunks.values():
                self._grads.used(chunk)

    def _check_trainable(self, managed: ManagedParam) -> None:
        if not self.params.is_in_place(managed):
            raise HeteroError(
                f"{managed.name} was moved or converted after hetero.initialize() (model.to(), "
                f".half(), an assignment to .data), or step() runs inside hetero.gathered(); its "
                f"update would be lost"
            )
        if managed.changed_unnoticed:
            raise HeteroError(
                f"{managed.name} was changed in place outside hetero.gathered(..., "
                f"modifier_rank=0); its master would not follow"
            )
        if not managed.chunk.trainable and managed.param.grad is not None:
            raise HeteroError(
                f"{managed.name} was frozen at hetero.initialize() and has a gradient now, but no "
                f"optimizer state; set requires_grad before initialize()"
            )

    def _check_factors(self, members: Sequence[ManagedParam]) -> None:
        for m in members:
            if not math.isfinite(m.grad_factor):
                raise NonFiniteError(
                    f"the gradient of {m.name} is multiplied by {m.grad_factor}, because it was "
                    f"clipped or unscaled by a number that is not finite; look at the norm that "
                    f"clipping returned, and call optimizer.zero_grad() to go on without this step"
                )

    def synchronize(self) -> None:
        """Until no transfer of the last step is under way. Raises what one met.

        Records that buffers keep for the next step are not written by this.
        """
        self._check_open()
        self._pipeline.wait_written()

    # Facts

    @property
    def traffic(self) -> Traffic:
        """Bytes moved so far. Between DEVICE and HOST none: on the CPU they are the same memory."""
        read = written = 0
        if self._disk is not None:
            now, before = self._disk.io.stats, self._disk.measuring
            read, written = (now[kind] - before[kind] for kind in ("read_bytes", "written_bytes"))
        groups = self.world.groups()
        sent = sum(peers.sent_bytes for peers in groups)
        received = sum(peers.received_bytes for peers in groups)
        return Traffic(0, 0, read, written, sent, received)

    @property
    def gather_wait_s(self) -> float:
        """Seconds that compute waited for chunks from other ranks: what prefetch did not hide."""
        gathering = self._ranks.gathering if self._ranks is not None else None
        return gathering.wait_s if gathering is not None else 0.0

    @property
    def device(self) -> torch.device:
        """Where the model computes and its inputs belong."""
        return torch.device("cpu")

    @property
    def io_engine(self) -> str | None:
        """ "io_uring" or "threads"; None if nothing is homed on DISK."""
        return self._disk.io.kind if self._disk is not None else None

    @property
    def isa(self) -> str:
        """The instruction set that the optimizer's kernels use."""
        return _native.isa()

    @contextmanager
    def open_record(self, chunk: Chunk, piece: int, rank: int) -> Iterator[Record | None]:
        """A piece's record of any rank's shard, to be read inside the block; None: frozen."""
        if rank == self.layout.shard.rank or not chunk.trainable:
            with self.records.open(chunk, piece) as record:
                yield record
            return
        assert self._ranks is not None
        assert self._ranks.server is not None
        raw = self.records.empty()
        self._ranks.server.request(Kind.RECORD, chunk, piece, rank, raw).wait()
        yield self.records.over(raw)

    def managed_params(self) -> list[ManagedParam]:
        """All managed parameters, in the model's order."""
        return sorted(self._managed.values(), key=lambda m: m.slice.param.index)

    # End

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this model's engine was closed; build the model again to go on")

    def close(self) -> None:
        """Frees memory, file and threads; idempotent. Any later use raises ClosedError.

        With several ranks all should call it: each answers the others until they do, too.
        """
        if self._closed:
            return
        self._leave_ranks()
        self._closed = True
        self._finalizer.detach()
        model = self._model()
        if model is not None:
            refuse_use(
                model,
                lambda: ClosedError("the model was used after its engine was closed"),
            )
        for m in self._managed.values():
            m.param.data = m.absent
            m.param.grad = None
        self._free()

    def _leave_ranks(self) -> None:
        if self._ranks is not None and self._ranks.server is not None:
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            if error is not None:  # others see this process end sooner if it does not linger
                self.world.failures.note(-1, f"{self.world.name} ended by {error!r}")
            self._ranks.server.close()

    def _free(self) -> None:
        if not self._closed:
            self._leave_ranks()
        self._closed = True
        for hooks in self._hooks:
            hooks.remove()
        self.params.forget()
        self._resources.close()
        self.world.close()
