"""Parameters that get a chunk group after initialize(): unfrozen ones, and those of new groups.

Added parameters are taken in by all ranks or by none: they agree when room is made, and when values
have moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup, build_chunk_group
from hetero.chunks.dtypes import Dtypes, is_manageable
from hetero.chunks.layout import ParamSpec
from hetero.planning.group_plans import (
    ChunkGroupPlan,
    groups_of,
    kept_in_fp32,
    kinds_of,
    plan_chunk_groups,
)
from hetero.planning.placement import Budgets, SlotBytes
from hetero.runtime.engine import Engine
from hetero.runtime.relocation import budgets_of
from hetero.runtime.update_schedule import is_free
from hetero.setup.construction_store import take_from_first
from hetero.setup.first_values import FirstValues, fill
from hetero.stand_ins.construction_uses import arena_of
from hetero.state.managed_param import ManagedParam, can_train, refuse_managed
from offload.errors import HeteroError
from offload.memory.tiers import Tier

_COMING = "the parameters that come to the optimizer"


class AddedParams:
    """Gives parameters of the model a place in new chunk groups, from what the budgets have left.

    Frozen ones that need gradients now keep their values (the fp32 master is that of the compute
    dtype) and start with zero moments, at step 0; the old chunk keeps its bytes. New ones, of
    modules that the model has got since, become the compute dtype. With several ranks all must add
    the same.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._frozen: list[ManagedParam]  # the parameters without an optimizer state
        self._find_frozen()

    def _find_frozen(self) -> None:
        managed = self._engine.params.in_order()
        self._frozen = [m for m in managed if not m.chunk.trainable]

    def take_in_unfrozen(self) -> None:
        """Adds the frozen parameters that need gradients by now and are the optimizer's.

        Those that are in use are left for another time. Raises as admit().
        """
        unfrozen = [m for m in self._frozen if m.param.requires_grad]
        self._engine.params.take_in_written(unfrozen)
        waiting = list(filter(is_free, unfrozen))
        if not waiting:
            return
        found = [m.param for m in waiting if self._engine.steps.optimizer_of(m.param) is not None]
        if found:
            self._add(found)

    def admit(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Adds the parameters of a new param group that have no optimizer state yet.

        Raises:
            BudgetError: there is no room; it says the smallest budget that works.
            HeteroError: ranks differ, or a parameter is in use.
            StoreError, NativeIoError: the file cannot be used. Nothing is changed in any case.
        """
        self._engine.steps.schedule.revoke_all()
        wanted = [p for p in params if p.numel() and can_train(p)]
        names = {id(p): name for name, p in self._engine.model.named_parameters()}
        facts = {
            f"number {i}": f"{names.get(id(p), 'a stranger')} {tuple(p.shape)}"
            for i, p in enumerate(wanted)
        }
        self._engine.world.require_equal(facts, "the param groups that are added")
        added = []
        for param in wanted:
            known = self._engine.params.known(param)
            if known is not None:
                if known.chunk.trainable or not param.requires_grad:
                    continue
                self._engine.params.take_in_written([known])
                if not is_free(known):
                    raise HeteroError(
                        f"{known.name} is in use; call add_param_group() outside hetero.gathered()"
                    )
            added.append(param)
        if added:
            self._add(added)

    def _add(self, params: Sequence[torch.nn.Parameter]) -> None:
        engine = self._engine
        engine.steps.schedule.wait_all()
        engine.steps.schedule.wait_copied()
        engine.world.together(f"make room for {_COMING}", self._charge_unmanaged)
        for optimizer in engine.steps.optimizers:
            mine = [p for p in params if engine.steps.optimizer_of(p) is optimizer]
            if mine:
                groups = _make_chunk_groups(engine, engine.model, mine, optimizer.dtypes)
                engine.take_over(groups)
        self._find_frozen()

    def _charge_unmanaged(self) -> None:
        """Charges what modules have brought since that gets no place in a chunk."""
        shared = self._engine.shared
        tier = Tier.DEVICE if shared.backend.in_order else Tier.HOST
        for name, param in self._engine.model.named_parameters():
            if not is_manageable(param, name):
                shared.unmanaged.charge(param, tier, name)


def _make_chunk_groups(
    engine: Engine,
    model: torch.nn.Module,
    params: Sequence[torch.nn.Parameter],
    dtypes: Dtypes,
) -> list[ChunkGroup]:
    """Chunk groups that have `params` and their values; the engine does not know of them yet.

    `dtypes` are of their optimizer. All ranks must do so. Raises as AddedParams.admit(), with
    nothing taken.
    """
    specs = _specs(engine, model, params)
    by_index = {s.index: p for s, p in specs}
    facts = {s.name: f"{tuple(p.shape)}, requires_grad={p.requires_grad}" for s, p in specs}
    engine.world.require_equal(facts, _COMING)
    if engine.shared.loss_scale.dynamic:
        _refuse_scaled(specs)
    # A number for each element, of the new ones after all others.
    first_number = dict(engine.params.first_number)
    end = max(first_number[m.slice.param.index] + m.numel for m in engine.params.in_order())
    for spec, _ in specs:
        if spec.index not in first_number:
            first_number[spec.index] = end
            end += spec.numel
    kept = kept_in_fp32(model, engine.config.keep_fp32)
    is_kept = [
        id(p) in kept if (known := engine.params.known(p)) is None else known.dtype is torch.float32
        for _, p in specs
    ]
    kinds = kinds_of([s for s, _ in specs], is_kept, engine.config, [dtypes] * len(specs))
    shard, first = engine.layout.shard, len(engine.chunk_groups)
    budgets = _budgets(engine)
    plans = plan_chunk_groups(model, kinds, by_index, engine.config, budgets, shard, first)
    _begin_alike(engine, model, by_index.values())
    spare_bytes = budgets.host - budgets.taken_host
    spare_bytes -= sum(plan.placement.host_bytes for plan in plans)
    with ExitStack() as resources:
        chunk_groups = [
            _make(engine, plan, by_index, first_number, spare_bytes, resources) for plan in plans
        ]
        resources.pop_all()
    engine.params.first_number.update(first_number)
    return chunk_groups


def _make(
    engine: Engine,
    plan: ChunkGroupPlan,
    params: Mapping[int, torch.nn.Parameter],
    first_number: Mapping[int, int],
    spare_bytes: int,
    resources: ExitStack,
) -> ChunkGroup:
    """The chunk group with its values, on all ranks or on none."""
    world = engine.world.duplicate()
    resources.callback(world.close)

    def build() -> ChunkGroup:
        chunk_group = build_chunk_group(
            plan,
            params,
            first_number,
            engine.shared,
            world,
            spare_bytes,
        )
        resources.callback(chunk_group.close)
        return chunk_group

    chunk_group = engine.world.together(f"make room for {_COMING}", build)

    def elements(managed: ManagedParam, wanted: slice) -> torch.Tensor:
        """From its old chunk, or the module's own tensor."""
        old, values = engine.params.known(managed.param), managed.param.data
        if old is not None:
            values = old.part_of(engine.params.flat(old.chunk))
        return values.reshape(-1)[wanted]

    def bring() -> None:
        try:
            fill(chunk_group, FirstValues(elements))
            chunk_group.commit()
        except Exception as error:
            chunk_group.params.updates.fail_waiting_ranks(f"{type(error).__name__}: {error}")
            raise

    engine.world.together(f"move {_COMING}", bring)
    return chunk_group


def _begin_alike(
    engine: Engine, model: torch.nn.Module, params: Iterable[torch.nn.Parameter]
) -> None:
    """Makes new parameters, and the buffers beside them, those of the first rank."""
    everyone = engine.world.everyone
    if everyone is None:
        return
    new = {id(p): p for p in params if engine.params.known(p) is None}
    for param in new.values():
        take_from_first(param.data, everyone)
    for module in model.modules():
        if any(id(p) in new for p in module._parameters.values()):
            for buffer in module._buffers.values():
                if buffer is not None and buffer.numel():
                    take_from_first(buffer, everyone)


def _specs(
    engine: Engine, model: torch.nn.Module, params: Sequence[torch.nn.Parameter]
) -> list[tuple[ParamSpec, torch.nn.Parameter]]:
    """The specs of `params`, in the model's order; new parameters come after all others.

    Raises ValueError for one that is not the model's, HeteroError for one that cannot be managed.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    group_of = groups_of(model, engine.config.debugging.shard_strategy)
    found = []
    next_index = len(engine.params.first_number)
    for param in dict.fromkeys(params):
        known = engine.params.known(param)
        group = group_of.get(id(param))
        if known is not None:
            assert not known.chunk.trainable
            spec = replace(known.slice.param, trainable=True, group=group)
        else:
            if id(param) not in names or not param.is_floating_point():
                raise ValueError(
                    f"the param group has a parameter of shape {tuple(param.shape)} that is not "
                    f"one of this model's; add its module to the model first"
                )
            _check_new(param, names[id(param)])
            trains = param.requires_grad
            spec = ParamSpec(next_index, names[id(param)], param.numel(), trains, group)
            next_index += 1
        found.append((spec, param))
    return sorted(found, key=lambda pair: pair[0].index)


def _check_new(param: torch.nn.Parameter, name: str) -> None:
    if param.device.type != "cpu":
        raise HeteroError(f"{name} is on {param.device}; make the module on the CPU")
    if arena_of(param) is not None:
        raise HeteroError(
            f"{name} was made in a ZeroInitContext, which is for models that are initialized; make "
            f"a module that comes later outside of it"
        )
    refuse_managed(param, name)


def _refuse_scaled(specs: Sequence[tuple[ParamSpec, torch.nn.Parameter]]) -> None:
    for spec, param in specs:
        if param.grad is not None:
            raise HeteroError(
                f"{spec.name} got a gradient before hetero kept it, and with fp16 it is unknown "
                f"whether that is times the loss scale; set its .grad to None and run a forward of "
                f"the whole model before the backward"
            )


def _budgets(engine: Engine) -> Budgets:
    """The engine's budgets, less what its chunk groups have planned or, if that is more, use."""
    budgets = budgets_of(engine.shared, {})
    for chunk_group in engine.chunk_groups:
        chunk_group.params.copies.cache.shrink()
        slot = SlotBytes.of(chunk_group.layout, chunk_group.dtypes)
        budgets = budgets.minus(chunk_group.placement, slot)
    in_use = engine.ledger.in_use_bytes  # some slots may be in use beyond the plan
    agree = engine.world.agree
    return replace(
        budgets,
        taken_host=agree(max(budgets.taken_host, in_use[Tier.HOST.value]), max, "budgets"),
        taken_disk=agree(max(budgets.taken_disk, in_use[Tier.DISK.value]), max, "budgets"),
        taken_device=agree(max(budgets.taken_device, in_use[Tier.DEVICE.value]), max, "budgets"),
    )
