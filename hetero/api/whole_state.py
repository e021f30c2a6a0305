"""Optimizer state and masters as whole tensors: out of the chunks and back into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunks.layout import Chunk
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from hetero.state.optimizer_state import OptimizerState, TilePart, TileState, parts_of


@dataclass(frozen=True)
class Piece:
    """The elements `part` of a parameter, which lie in one tile of a rank's shard.

    `values` are theirs, flat, in the compute dtype; `optim_state` is the tile's, None if the
    parameter is frozen; `optim_states` joins the two to masters, and splits these.
    """

    managed: ManagedParam
    part: TilePart
    values: torch.Tensor
    optim_state: TileState | None
    optim_states: OptimizerState

    def states(self) -> Sequence[torch.Tensor]:
        """The rule's states, in fp32."""
        assert self.optim_state is not None
        return self.optim_states.states(self.optim_state, self.part.in_tile)

    def set_states(self, states: Sequence[torch.Tensor]) -> None:
        """Replaces the rule's states; set_master() must follow."""
        assert self.optim_state is not None
        self.optim_states.set_states(self.optim_state, self.part.in_tile, states)

    def master(self) -> torch.Tensor:
        """The fp32 master; of a frozen parameter its value."""
        if self.optim_state is None:
            return self.values
        return self.optim_states.join(self.values, self.optim_state, self.part.in_tile)

    def set_master(self, master: torch.Tensor) -> None:
        """Replaces the master by `master`, and the value by what that rounds to."""
        if self.optim_state is None:
            self.values.copy_(master)
        else:
            self.optim_states.split(master, self.values, self.optim_state, self.part.in_tile)


Visit = Callable[[Piece], None]
Opened = Callable[[int], AbstractContextManager[TileState | None]]  # the state of a tile

# Of a piece: what is copied of optimizer states in fp32 at a time stays a few MiB.
PART_NUMEL = 1 << 20


def read_parts(engine: Engine, managed: Iterable[ManagedParam], visit: Visit) -> None:
    """Calls `visit` for each piece of parameters, of all ranks' shards.

    The other ranks need not call it. The optimizer state of each tile is brought in once.
    """
    for chunk_group, members in _settled(engine, managed):
        _read_chunk(chunk_group, members, visit)


def _read_chunk(chunk_group: ChunkGroup, members: list[ManagedParam], visit: Visit) -> None:
    # A function of its own so that the pin on one chunk ends before the next is brought in.
    chunk, ranks = members[0].chunk, chunk_group.layout.shard
    flat = chunk_group.params.flat(chunk)
    for rank in range(ranks.ranks):
        shard = flat[ranks.range(flat.numel(), rank)]
        opened = partial(chunk_group.open_optim_state, chunk, rank=rank)
        _visit_shard(chunk_group, members, shard, opened, visit, rank)


def write_parts(
    engine: Engine, managed: Iterable[ManagedParam], visit: Visit, replaces: bool = False
) -> None:
    """Calls `visit` for each piece of this rank's shards, and keeps what it changes in place.

    All ranks must call it. `replaces`: `visit` sets masters and states of all parameters in the
    chunks of `managed`, so that what there was is not read.
    """
    for chunk_group, members in _settled(engine, managed):
        chunk = members[0].chunk
        opened = partial(chunk_group.optim_states.open, chunk, write=True, fresh=replaces)
        engine.steps.meet(f"changing {chunk.name}")
        with chunk_group.params.shard(chunk) as shard:
            _visit_shard(chunk_group, members, shard, opened, visit)
            chunk_group.params.filled(chunk)
        del shard
        for m in members:
            torch.autograd.graph.increment_version(m.param)
            m.writes.note()


def fill_parts(
    engine: Engine, managed: Iterable[ManagedParam], fill: Visit, replaces: bool = False
) -> Exception | None:
    """write_parts() with what may fail on one rank, as reading a file may.

    Returns what `fill` met, after which it is not called any more. All ranks still go through all
    chunks together, and can agree afterwards.
    """
    failures: list[Exception] = []

    def visit(piece: Piece) -> None:
        if not failures:
            try:
                fill(piece)
            except Exception as error:
                failures.append(error)

    write_parts(engine, managed, visit, replaces)
    return failures[0] if failures else None


def _visit_shard(
    chunk_group: ChunkGroup,
    members: list[ManagedParam],
    shard: torch.Tensor,
    opened: Opened,
    visit: Visit,
    rank: int | None = None,
) -> None:
    """Calls `visit` for each piece of a rank's shard of one chunk; `opened` has a tile's state."""
    for tile, parts in parts_by_tile(chunk_group, members, rank):
        with opened(tile) as optim_state:
            first = tile * chunk_group.layout.tile_numel
            values = shard[first : first + chunk_group.layout.tile_numel]
            for m, part in parts:
                visit(make_piece(chunk_group, m, part, values, optim_state))


def _settled(
    engine: Engine, managed: Iterable[ManagedParam]
) -> list[tuple[ChunkGroup, list[ManagedParam]]]:
    """by_chunk() with all of their updates made, and what was written."""
    managed = list(managed)
    engine.steps.schedule.revoke_all()
    engine.params.take_in_written(managed)
    return by_chunk(engine, managed)


def by_chunk(
    engine: Engine, managed: Iterable[ManagedParam]
) -> list[tuple[ChunkGroup, list[ManagedParam]]]:
    """The parameters by their chunks, each with its chunk group."""
    found: dict[Chunk, list[ManagedParam]] = {}
    for m in managed:
        found.setdefault(m.chunk, []).append(m)
    return [(engine.params.group(chunk), members) for chunk, members in found.items()]


def parts_by_tile(
    chunk_group: ChunkGroup, members: Iterable[ManagedParam], rank: int | None = None
) -> list[tuple[int, list[tuple[ManagedParam, TilePart]]]]:
    """The parts of `members`, which are in one chunk, in a rank's shard (default: this rank's).

    They are by tile, and cut so that a part has at most PART_NUMEL elements.
    """
    by_tile: dict[int, list[tuple[ManagedParam, TilePart]]] = {}
    for m in members:
        for part in parts_of(m, chunk_group.layout, rank):
            by_tile.setdefault(part.tile, []).extend(
                (m, part.cut(begin, min(begin + PART_NUMEL, part.numel)))
                for begin in range(0, part.numel, PART_NUMEL)
            )
    return sorted(by_tile.items())


def make_piece(
    chunk_group: ChunkGroup,
    m: ManagedParam,
    part: TilePart,
    tile_values: torch.Tensor,
    optim_state: TileState | None,
) -> Piece:
    """The piece of a parameter in a tile, whose values and optimizer state these are."""
    return Piece(m, part, tile_values[part.in_tile], optim_state, chunk_group.optim_states)


def _fp32(numel: int) -> torch.Tensor:
    """Memory for that many numbers, whatever torch's defaults are."""
    return torch.empty(numel, dtype=torch.float32, device="cpu")


def export_masters(
    engine: Engine, params: Iterable[torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """Copies each parameter's fp32 master, whole; of a frozen parameter its value in fp32."""
    masters = {m: _fp32(m.numel) for m in engine.find_all(params)}

    def visit(piece: Piece) -> None:
        masters[piece.managed][piece.part.in_param] = piece.master()

    read_parts(engine, masters, visit)
    return {m.param: master.view(m.param.shape) for m, master in masters.items()}


def export_states(
    engine: Engine, params: Iterable[torch.Tensor], names: Sequence[str]
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Copies "step", the rule's states (`names`) and "master" of each trained parameter.

    All are in fp32, whole, in the parameter's shape.
    """
    trained = [m for m in engine.find_all(params) if m.chunk.trainable]
    states = {m: {key: _fp32(m.numel) for key in (*names, "master")} for m in trained}

    def visit(piece: Piece) -> None:
        state = states[piece.managed]
        for name, found in zip(names, piece.states(), strict=True):
            state[name][piece.part.in_param] = found
        state["master"][piece.part.in_param] = piece.master()

    read_parts(engine, trained, visit)
    return {
        m.param: {
            "step": torch.tensor(float(m.step), dtype=torch.float32, device="cpu"),
            **{key: value.view(m.param.shape) for key, value in state.items()},
        }
        for m, state in states.items()
    }


def import_states(
    engine: Engine, states: Mapping[torch.Tensor, Mapping[str, Any]], names: Sequence[str]
) -> None:
    """Replaces states by what export_states() gave; parameters become their masters, rounded.

    A master that is not given stays.
    """
    members = {engine.find(param): state for param, state in states.items()}

    def visit(piece: Piece) -> None:
        def flat(key: str) -> torch.Tensor:
            tensor: torch.Tensor = members[piece.managed][key]
            return tensor.reshape(-1)[piece.part.in_param].float()

        # (Before the states are replaced: one of them has a bit of the master.)
        master = flat("master") if "master" in members[piece.managed] else piece.master()
        piece.set_states([flat(name) for name in names])
        piece.set_master(master)

    write_parts(engine, members, visit)
    for m, state in members.items():
        m.step = int(state["step"])


def store_values(engine: Engine, values: Mapping[ManagedParam, torch.Tensor]) -> None:
    """Replaces parameters by `values`, of any float dtype, and masters where a value is another.

    Values of the compute dtype are what masters were rounded to: where one is the parameter's bit
    for bit, the master stays, with the bits that the value lacks. Values of another dtype are meant
    as they are, and become the masters, also one that fp32 and the compute dtype both have.
    """

    def visit(piece: Piece) -> None:
        old = piece.values
        new = values[piece.managed].reshape(-1)[piece.part.in_param].to(old.device).contiguous()
        if new.dtype != old.dtype:
            piece.set_master(new.float())
        elif piece.optim_state is None:
            old.copy_(new)
        else:
            bits = torch.int32 if new.itemsize == 4 else torch.int16
            changed = new.view(bits) != old.view(bits)
            master = piece.master()
            master[changed.to(master.device)] = new[changed].float().to(master.device)
            piece.set_master(master)

    write_parts(engine, values, visit)
