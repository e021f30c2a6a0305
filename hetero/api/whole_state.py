"""Optimizer state and masters as whole tensors: out of the chunks and back into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hetero.chunks.layout import Layout
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from hetero.state.optimizer_state import Part, TileState, parts_of

Visit = Callable[[ManagedParam, Part, torch.Tensor, TileState | None], None]


def read_parts(engine: Engine, managed: Iterable[ManagedParam], visit: Visit) -> None:
    """Calls `visit` for each part of parameters, of all ranks' shards.

    The other ranks need not call it. The optimizer state of each tile is brought in once.

    Args:
        engine: manages the parameters.
        managed: the parameters.
        visit: gets the parameter, the part, the parameter's values in the part (flat, compute
            dtype) and the tile's optimizer state (None if the parameter is frozen).
    """
    engine.schedule.require_whole("reading masters or optimizer states")
    for members in _by_chunk(managed):
        _read_chunk(engine, members, visit)


def _read_chunk(engine: Engine, members: list[ManagedParam], visit: Visit) -> None:
    # A function of its own so that the pin on one chunk ends before the next is brought in.
    chunk, chunk_group = members[0].chunk, engine.chunk_group_of(members[0])
    layout = chunk_group.layout
    flat = chunk_group.params.flat(chunk)
    for rank in range(layout.shard.ranks):
        shard = flat[layout.shard.range(flat.numel(), rank)]
        for tile, parts in _parts(layout, members, rank):
            with chunk_group.open_optim_state(chunk, tile, rank) as optim_state:
                for m, part in parts:
                    visit(m, part, shard[_in_shard(layout, part)], optim_state)


def write_parts(engine: Engine, managed: Iterable[ManagedParam], visit: Visit) -> None:
    """Calls `visit` for each part of this rank's shards, and keeps what it changes.

    All ranks must call it. The arguments are those of read_parts(); `visit` may change the
    parameter's values and the optimizer state in place.
    """
    engine.schedule.require_whole("changing parameters or optimizer states")
    for members in _by_chunk(managed):
        _write_chunk(engine, members, visit)


def _write_chunk(engine: Engine, members: list[ManagedParam], visit: Visit) -> None:
    chunk, chunk_group = members[0].chunk, engine.chunk_group_of(members[0])
    engine.meet(torch.tensor([chunk.id]), f"changing {chunk.name}")
    with chunk_group.params.shard(chunk) as shard:
        for tile, parts in _parts(chunk_group.layout, members):
            with chunk_group.optim_states.open(chunk, tile, write=True) as optim_state:
                for m, part in parts:
                    visit(m, part, shard[_in_shard(chunk_group.layout, part)], optim_state)
        chunk_group.params.filled(chunk)
    for m in members:
        torch.autograd.graph.increment_version(m.param)
        m.note_change()


def _by_chunk(managed: Iterable[ManagedParam]) -> Iterable[list[ManagedParam]]:
    by_chunk: dict[tuple[int, int], list[ManagedParam]] = {}
    for m in managed:
        by_chunk.setdefault((m.chunk.group_index, m.chunk.id), []).append(m)
    return by_chunk.values()


def _parts(
    layout: Layout, members: list[ManagedParam], rank: int | None = None
) -> list[tuple[int, list[tuple[ManagedParam, Part]]]]:
    """The parts of `members` in a rank's shard (default: this rank's), by tile."""
    by_tile: dict[int, list[tuple[ManagedParam, Part]]] = {}
    for m in members:
        for part in parts_of(m, layout, rank):
            by_tile.setdefault(part.tile, []).append((m, part))
    return sorted(by_tile.items())


def _in_shard(layout: Layout, part: Part) -> slice:
    first = part.tile * layout.tile_numel
    return slice(first + part.in_tile.start, first + part.in_tile.stop)


def export_masters(
    engine: Engine, params: Iterable[torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """Copies each parameter's fp32 master, whole; of a frozen parameter its value in fp32."""
    masters = {m: torch.empty(m.numel) for m in engine.find_all(params)}

    def visit(
        m: ManagedParam, part: Part, values: torch.Tensor, optim_state: TileState | None
    ) -> None:
        masters[m][part.in_param] = (
            values
            if optim_state is None
            else engine.chunk_group_of(m).optim_states.join(values, optim_state, part.in_tile)
        )

    read_parts(engine, masters, visit)
    return {m.param: master.view(m.param.shape) for m, master in masters.items()}


def export_states(
    engine: Engine, params: Iterable[torch.Tensor], names: Sequence[str]
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Copies "step", the rule's states (`names`) and "master" of each trained parameter.

    All are in fp32, whole, in the parameter's shape.
    """
    trained = [m for m in engine.find_all(params) if m.chunk.trainable]
    states = {m: {key: torch.empty(m.numel) for key in (*names, "master")} for m in trained}

    def visit(
        m: ManagedParam, part: Part, values: torch.Tensor, optim_state: TileState | None
    ) -> None:
        assert optim_state is not None
        optim_states, state = engine.chunk_group_of(m).optim_states, states[m]
        for name, found in zip(names, optim_states.states(optim_state, part.in_tile), strict=True):
            state[name][part.in_param] = found
        state["master"][part.in_param] = optim_states.join(values, optim_state, part.in_tile)

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
    """Replaces states by what export_states() gave; parameters become their masters, rounded."""
    members = {engine.find(param): state for param, state in states.items()}

    def visit(
        m: ManagedParam, part: Part, values: torch.Tensor, optim_state: TileState | None
    ) -> None:
        assert optim_state is not None
        state, where = members[m], part.in_tile

        def flat(key: str) -> torch.Tensor:
            tensor: torch.Tensor = state[key]
            return tensor.reshape(-1)[part.in_param].float()

        for name, kept in zip(names, optim_state.states, strict=True):
            kept[where] = flat(name)
        engine.chunk_group_of(m).optim_states.split(flat("master"), values, optim_state, where)

    write_parts(engine, members, visit)
    for m, state in members.items():
        m.step = int(state["step"])


def store_masters(engine: Engine, values: Mapping[ManagedParam, torch.Tensor]) -> None:
    """Replaces masters by `values` (any float dtype) and parameters by what they round to."""

    def visit(
        m: ManagedParam, part: Part, old: torch.Tensor, optim_state: TileState | None
    ) -> None:
        new = values[m].reshape(-1)[part.in_param].to(old.device).float()
        if optim_state is None:
            old.copy_(new)
        else:
            engine.chunk_group_of(m).optim_states.split(new, old, optim_state, part.in_tile)

    write_parts(engine, values, visit)


def store_values(engine: Engine, values: Mapping[ManagedParam, torch.Tensor]) -> None:
    """Replaces parameters by `values` (compute dtype), and masters where a value is another."""

    def visit(
        m: ManagedParam, part: Part, old: torch.Tensor, optim_state: TileState | None
    ) -> None:
        new = values[m].reshape(-1)[part.in_param].to(old.device)
        if optim_state is None:
            old.copy_(new)
            return
        master = engine.chunk_group_of(m).optim_states.join(old, optim_state, part.in_tile)
        changed = new.view(torch.uint8) != old.view(torch.uint8)
        changed = changed.view(new.numel(), -1).any(dim=1)
        master[changed] = new[changed].float()
        engine.chunk_group_of(m).optim_states.split(master, old, optim_state, part.in_tile)

    write_parts(engine, values, visit)
