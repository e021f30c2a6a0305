"""Optimizer state and masters as whole tensors: out of the chunks and back into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hetero.engine import Engine
from hetero.managed import ManagedParam
from hetero.records import Part, Record, parts_of

Visit = Callable[[ManagedParam, Part, torch.Tensor, Record | None], None]


def visit_parts(
    engine: Engine, managed: Iterable[ManagedParam], visit: Visit, write: bool = False
) -> None:
    """Calls `visit(managed, part, parameter values of the part, record)` for every part.

    Each piece's record is brought in once. With `write` what `visit` changes goes home, parameter
    values included.
    """
    by_chunk: dict[int, list[ManagedParam]] = {}
    for m in managed:
        by_chunk.setdefault(m.chunk.id, []).append(m)
    for members in by_chunk.values():
        _visit_chunk(engine, members, visit, write)


def _visit_chunk(engine: Engine, members: list[ManagedParam], visit: Visit, write: bool) -> None:
    # A function of its own so that the lease on one chunk ends before the next is brought in.
    slot_numel = engine.layout.slot_numel
    chunk = members[0].chunk
    flat = engine.params.flat(chunk)
    parts = [(m, part) for m in members for part in parts_of(m, slot_numel)]
    for piece in sorted({part.piece for _, part in parts}):
        in_slot = flat[piece * slot_numel : (piece + 1) * slot_numel]
        with engine.records.open(chunk, piece, write) as record:
            for m, part in parts:
                if part.piece == piece:
                    visit(m, part, in_slot[part.in_piece], record)
    if write:
        engine.params.filled(chunk)
        for m in members:
            torch.autograd.graph.increment_version(m.param)
            m.note_change()


def export_masters(
    engine: Engine, params: Iterable[torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """Each parameter's fp32 master; of a frozen parameter its value in fp32."""
    masters = {m: torch.empty(m.numel) for m in engine.find_all(params)}

    def visit(m: ManagedParam, part: Part, values: torch.Tensor, record: Record | None) -> None:
        masters[m][part.in_param] = (
            values if record is None else engine.records.join(values, record, part.in_piece)
        )

    visit_parts(engine, masters, visit)
    return {m.param: master.view(m.param.shape) for m, master in masters.items()}


def export_states(
    engine: Engine, params: Iterable[torch.Tensor]
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """step, exp_avg, exp_avg_sq and master of each trained parameter, in fp32."""
    trained = [m for m in engine.find_all(params) if m.chunk.trainable]
    states = {
        m: {key: torch.empty(m.numel) for key in ("exp_avg", "exp_avg_sq", "master")}
        for m in trained
    }

    def visit(m: ManagedParam, part: Part, values: torch.Tensor, record: Record | None) -> None:
        assert record is not None
        records, state = engine.records, states[m]
        exp_avg, exp_avg_sq = record.states
        state["exp_avg"][part.in_param] = exp_avg[part.in_piece]
        state["exp_avg_sq"][part.in_param] = exp_avg_sq[part.in_piece].abs()
        state["master"][part.in_param] = records.join(values, record, part.in_piece)

    visit_parts(engine, trained, visit)
    return {
        m.param: {
            "step": torch.tensor(float(m.step)),
            **{key: value.view(m.param.shape) for key, value in state.items()},
        }
        for m, state in states.items()
    }


def import_states(engine: Engine, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
    """Takes what export_states() gave, parameter values (the rounded masters) included."""
    members = {engine.find(param): state for param, state in states.items()}

    def visit(m: ManagedParam, part: Part, values: torch.Tensor, record: Record | None) -> None:
        assert record is not None
        state, where = members[m], part.in_piece

        def flat(key: str) -> torch.Tensor:
            tensor: torch.Tensor = state[key]
            return tensor.reshape(-1)[part.in_param].float()

        exp_avg, exp_avg_sq = record.states
        exp_avg[where] = flat("exp_avg")
        exp_avg_sq[where] = flat("exp_avg_sq")
        engine.records.split(flat("master"), values, record, where)

    visit_parts(engine, members, visit, write=True)
    for m, state in members.items():
        m.step = int(state["step"])


def store_masters(engine: Engine, values: Mapping[ManagedParam, torch.Tensor]) -> None:
    """Replaces masters by `values` (any float dtype) and parameters by what they round to."""

    def visit(m: ManagedParam, part: Part, old: torch.Tensor, record: Record | None) -> None:
        new = values[m].reshape(-1)[part.in_param].float()
        if record is None:
            old.copy_(new)
        else:
            engine.records.split(new, old, record, part.in_piece)

    visit_parts(engine, values, visit, write=True)


def store_values(engine: Engine, values: Mapping[ManagedParam, torch.Tensor]) -> None:
    """Replaces parameter values (compute dtype). Where one changed, the master becomes just it."""

    def visit(m: ManagedParam, part: Part, old: torch.Tensor, record: Record | None) -> None:
        new = values[m].reshape(-1)[part.in_param]
        if record is None:
            old.copy_(new)
            return
        master = engine.records.join(old, record, part.in_piece)
        changed = new.view(torch.uint8) != old.view(torch.uint8)
        changed = changed.view(new.numel(), -1).any(dim=1)
        master[changed] = new[changed].float()
        engine.records.split(master, old, record, part.in_piece)

    visit_parts(engine, values, visit, write=True)
