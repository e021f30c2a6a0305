"""Optimizer state and masters as whole tensors: out of the chunks and back into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hetero.chunks.layout import Layout
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from hetero.state.optimizer_state import Part, Record, parts_of

Visit = Callable[[ManagedParam, Part, torch.Tensor, Record | None], None]


def read_parts(engine: Engine, managed: Iterable[ManagedParam], visit: Visit) -> None:
    """Calls `visit(managed, part, parameter values of the part, record)` for every part.

    Of all ranks' shards; the other ranks need do nothing. Each piece's record is brought in once.
    """
    engine.early.require_whole("reading masters or optimizer states")
    for members in _by_chunk(managed):
        _read_chunk(engine, members, visit)


def _read_chunk(engine: Engine, members: list[ManagedParam], visit: Visit) -> None:
    # A function of its own so that the lease on one chunk ends before the next is brought in.
    chunk, bank = members[0].chunk, engine.bank_of(members[0])
    layout = bank.layout
    flat = bank.params.flat(chunk)
    for rank in range(layout.shard.ranks):
        shard = flat[layout.shard.range(flat.numel(), rank)]
        for piece, parts in _parts(layout, members, rank):
            with bank.open_record(chunk, piece, rank) as record:
                for m, part in parts:
                    visit(m, part, shard[_in_shard(layout, part)], record)


def write_parts(engine: Engine, managed: Iterable[ManagedParam], visit: Visit) -> None:
    """Likewise for this rank's shard; what `visit` changes, parameter values too, goes home.

    All ranks must do so.
    """
    engine.early.require_whole("changing parameters or optimizer states")
    for members in _by_chunk(managed):
        _write_chunk(engine, members, visit)


def _write_chunk(engine: Engine, members: list[ManagedParam], visit: Visit) -> None:
    chunk, bank = members[0].chunk, engine.bank_of(members[0])
    engine.meet(torch.tensor([chunk.id]), f"changing {chunk.name}")
    with bank.params.shard(chunk) as shard:
        for piece, parts in _parts(bank.layout, members):
            with bank.records.open(chunk, piece, write=True) as record:
                for m, part in parts:
                    visit(m, part, shard[_in_shard(bank.layout, part)], record)
        bank.params.filled(chunk)
    for m in members:
        torch.autograd.graph.increment_version(m.param)
        m.note_change()


def _by_chunk(managed: Iterable[ManagedParam]) -> Iterable[list[ManagedParam]]:
    by_chunk: dict[tuple[int, int], list[ManagedParam]] = {}
    for m in managed:
        by_chunk.setdefault((m.chunk.bank, m.chunk.id), []).append(m)
    return by_chunk.values()


def _parts(
    layout: Layout, members: list[ManagedParam], rank: int | None = None
) -> list[tuple[int, list[tuple[ManagedParam, Part]]]]:
    """What a rank's shard has of `members`, by piece."""
    by_piece: dict[int, list[tuple[ManagedParam, Part]]] = {}
    for m in members:
        for part in parts_of(m, layout, rank):
            by_piece.setdefault(part.piece, []).append((m, part))
    return sorted(by_piece.items())


def _in_shard(layout: Layout, part: Part) -> slice:
    first = part.piece * layout.piece_numel
    return slice(first + part.in_piece.start, first + part.in_piece.stop)


def export_masters(
    engine: Engine, params: Iterable[torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """Each parameter's fp32 master; of a frozen parameter its value in fp32."""
    masters = {m: torch.empty(m.numel) for m in engine.find_all(params)}

    def visit(m: ManagedParam, part: Part, values: torch.Tensor, record: Record | None) -> None:
        masters[m][part.in_param] = (
            values
            if record is None
            else engine.bank_of(m).records.join(values, record, part.in_piece)
        )

    read_parts(engine, masters, visit)
    return {m.param: master.view(m.param.shape) for m, master in masters.items()}


def export_states(
    engine: Engine, params: Iterable[torch.Tensor], names: Sequence[str]
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """step, the states (called `names`) and master of each trained parameter, in fp32."""
    trained = [m for m in engine.find_all(params) if m.chunk.trainable]
    states = {m: {key: torch.empty(m.numel) for key in (*names, "master")} for m in trained}

    def visit(m: ManagedParam, part: Part, values: torch.Tensor, record: Record | None) -> None:
        assert record is not None
        records, state = engine.bank_of(m).records, states[m]
        for name, found in zip(names, records.states(record, part.in_piece), strict=True):
            state[name][part.in_param] = found
        state["master"][part.in_param] = records.join(values, record, part.in_piece)

    read_parts(engine, trained, visit)
    return {
        m.param: {
            "step": torch.tensor(float(m.step)),
            **{key: value.view(m.param.shape) for key, value in state.items()},
        }
        for m, state in states.items()
    }


def import_states(
    engine: Engine, states: Mapping[torch.Tensor, Mapping[str, Any]], names: Sequence[str]
) -> None:
    """Takes what export_states() gave, parameter values (the rounded masters) included."""
    members = {engine.find(param): state for param, state in states.items()}

    def visit(m: ManagedParam, part: Part, values: torch.Tensor, record: Record | None) -> None:
        assert record is not None
        state, where = members[m], part.in_piece

        def flat(key: str) -> torch.Tensor:
            tensor: torch.Tensor = state[key]
            return tensor.reshape(-1)[part.in_param].float()

        for name, kept in zip(names, record.states, strict=True):
            kept[where] = flat(name)
        engine.bank_of(m).records.split(flat("master"), values, record, where)

    write_parts(engine, members, visit)
    for m, state in members.items():
        m.step = int(state["step"])


def store_masters(engine: Engine, values: Mapping[ManagedParam, torch.Tensor]) -> None:
    """Replaces masters by `values` (any float dtype) and parameters by what they round to."""

    def visit(m: ManagedParam, part: Part, old: torch.Tensor, record: Record | None) -> None:
        new = values[m].reshape(-1)[part.in_param].to(old.device).float()
        if record is None:
            old.copy_(new)
        else:
            engine.bank_of(m).records.split(new, old, record, part.in_piece)

    write_parts(engine, values, visit)


def store_values(engine: Engine, values: Mapping[ManagedParam, torch.Tensor]) -> None:
    """Replaces parameter values (compute dtype). Where one changed, the master becomes just it."""

    def visit(m: ManagedParam, part: Part, old: torch.Tensor, record: Record | None) -> None:
        new = values[m].reshape(-1)[part.in_param].to(old.device)
        if record is None:
            old.copy_(new)
            return
        master = engine.bank_of(m).records.join(old, record, part.in_piece)
        changed = new.view(torch.uint8) != old.view(torch.uint8)
        changed = changed.view(new.numel(), -1).any(dim=1)
        master[changed] = new[changed].float()
        engine.bank_of(m).records.split(master, old, record, part.in_piece)

    write_parts(engine, values, visit)
