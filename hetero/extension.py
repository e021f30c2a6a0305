"""New banks for parameters that the optimizer gets after initialize()."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hetero.arrangement import groups_of, kept_in_fp32, kinds_of, plan_banks
from hetero.bank import Bank, build_bank, manage
from hetero.filling import fill
from hetero.layout import Layout, ParamSpec
from hetero.managed import ManagedParam
from hetero.placement import Budgets, SlotBytes
from offload.errors import HeteroError
from offload.tiers import Tier

if TYPE_CHECKING:
    from hetero.engine import Engine

_BLOCK_NUMEL = 1 << 20  # of the fp32 copy of a parameter at a time


def extension(
    engine: Engine, model: torch.nn.Module, params: Sequence[torch.nn.Parameter]
) -> list[Bank]:
    """Banks that have `params` and their values; the engine does not know of them yet.

    All ranks must do so. Raises as Engine.extend(), with nothing taken.
    """
    specs = _specs(engine, model, params)
    by_index = {s.index: p for s, p in specs}
    facts = {s.name: f"{tuple(p.shape)}, requires_grad={p.requires_grad}" for s, p in specs}
    engine.world.require_equal(facts, "the parameters that come to the optimizer")
    if engine.loss_scale.dynamic:
        _refuse_scaled(specs)
    # A number for each element, of the new ones after all others.
    first_number = dict(engine.first_number)
    end = max(first_number[m.slice.param.index] + m.numel for m in engine.managed_params())
    for spec, _ in specs:
        if spec.index not in first_number:
            first_number[spec.index] = end
            end += spec.numel
    kept = kept_in_fp32(model, engine.config.keep_fp32)
    is_kept = [
        id(p) in kept if (known := engine.known(p)) is None else known.dtype is torch.float32
        for _, p in specs
    ]
    dtypes = replace(engine.config.dtypes, rule=engine.dtypes.rule, state=engine.dtypes.state)
    kinds = kinds_of([s for s, _ in specs], is_kept, engine.config, dtypes)
    shard, first = engine.layout.shard, len(engine.banks)
    # The bank with most to train averages early.
    trained = [sum(s.numel for s in some if s.trainable) for _, some in kinds]
    early = None
    if max(trained) > max(bank.trained_numel for bank in engine.banks if not bank.held):
        early = first + trained.index(max(trained))
    budgets = _budgets(engine, held=early is not None)
    plans = plan_banks(model, kinds, by_index, engine.config, budgets, shard, first, early)
    for _, param in specs:
        if engine.known(param) is None and engine.world.everyone is not None:
            values = param.data.contiguous()
            engine.world.everyone.broadcast(values, 0, "the first rank's values")
            param.data = values
    spare_bytes = budgets.host - budgets.taken_host
    spare_bytes -= sum(plan.placement.host_bytes for plan in plans)
    banks = []
    with ExitStack() as resources:
        for plan in plans:
            world = engine.world.another()
            resources.callback(world.close)
            bank = build_bank(
                plan,
                manage(plan, by_index),
                first_number,
                engine.config,
                engine.ledger,
                world,
                spare_bytes,
                engine.notes,
            )
            resources.callback(bank.close)
            fill(bank, _FromModel(engine))
            banks.append(bank)
        resources.pop_all()
    engine.first_number.update(first_number)
    return banks


def _specs(
    engine: Engine, model: torch.nn.Module, params: Sequence[torch.nn.Parameter]
) -> list[tuple[ParamSpec, torch.nn.Parameter]]:
    """In the model's order; what is new comes after all others."""
    names = {id(p): name for name, p in model.named_parameters()}
    group_of = groups_of(model, engine.config.shard_strategy)
    found = []
    next_index = len(engine.first_number)
    for param in dict.fromkeys(params):
        known = engine.known(param)
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
            if param.device.type != "cpu":
                raise HeteroError(
                    f"{names[id(param)]} is on {param.device}; make the module on the CPU"
                )
            trains = param.requires_grad
            spec = ParamSpec(next_index, names[id(param)], param.numel(), trains, group)
            next_index += 1
        found.append((spec, param))
    return sorted(found, key=lambda pair: pair[0].index)


def _refuse_scaled(specs: Sequence[tuple[ParamSpec, torch.nn.Parameter]]) -> None:
    for spec, param in specs:
        if param.grad is not None:
            raise HeteroError(
                f"{spec.name} got a gradient before hetero kept it, and with fp16 nobody knows "
                f"whether that is times the loss scale; set its .grad to None and run a forward of "
                f"the whole model before the backward"
            )


def _budgets(engine: Engine, held: bool) -> Budgets:
    """What the budgets are, and what is taken of them: planned, or, if that is more, in use.

    `held`: all banks that are there are going to be held.
    """
    ledger, banks = engine.ledger, engine.banks
    limits, in_use = ledger.budget_bytes, ledger.in_use_bytes
    placements = [bank.when_held() if held else bank.placement for bank in banks]
    planned_host = sum(placement.host_bytes for placement in placements)
    planned_disk = sum(placement.disk_bytes for placement in placements)
    agree = engine.world.agree
    return Budgets(
        host=limits[Tier.HOST.value] or 0,
        disk=limits[Tier.DISK.value] or 0,
        gathered=limits[Tier.DEVICE.value],
        keep_records=engine.config.host_memory is not None,
        taken_host=agree(max(planned_host, in_use[Tier.HOST.value]), max, "budgets"),
        taken_disk=agree(max(planned_disk, in_use[Tier.DISK.value]), max, "budgets"),
        taken_gathered=sum(
            bank.placement.gathered_slots * SlotBytes.of(bank.layout, bank.dtypes).gathered
            for bank in banks
        ),
        under_construction=False,
    )


class _FromModel:
    """Values of parameters where they are now: in their old chunk, or in the module's own RAM."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prepare(self, members: Sequence[ManagedParam], layout: Layout) -> None:
        """Nothing: every rank can see the whole."""

    def blocks(self, managed: ManagedParam, wanted: slice) -> Iterator[tuple[int, torch.Tensor]]:
        """Elements `wanted` of the flat parameter."""
        old = self._engine.known(managed.param)
        values = managed.param.data
        if old is not None:
            values = old.part_of(self._engine.params.flat(old.chunk))
        flat = values.reshape(-1)
        for begin in range(wanted.start, wanted.stop, _BLOCK_NUMEL):
            yield begin, flat[begin : min(begin + _BLOCK_NUMEL, wanted.stop)].float()

    def done(self, managed: ManagedParam) -> None:
        """Nothing: the parameter moves when all have got their values."""
