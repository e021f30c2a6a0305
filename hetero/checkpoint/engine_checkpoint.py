"""A model in training as a checkpoint: what it would have if it was saved now."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.api.optimizers import HybridAdagrad, HybridAdam, HybridLion, HybridMuon, HybridSGD
from hetero.api.whole_state import by_chunk, make_piece, parts_by_tile
from hetero.checkpoint.data_writer import Range
from hetero.checkpoint.manifest import (
    GroupRecord,
    Manifest,
    OptimizerRecord,
    ParamRecord,
    TensorRecord,
    data_key,
    master_key,
    state_key,
)
from hetero.checkpoint.plain_data import STORED_DTYPES, pack
from hetero.checkpoint.rank_data import Extra, pack_rank_data
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunk_groups.home_tiles import HomeTiles
from hetero.runtime.engine import Engine
from hetero.state.chunk_updates import Snapshot
from hetero.state.managed_param import ManagedParam
from offload.errors import CheckpointError


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of an engine's model, by their first names in it.

    Attributes:
        params: the managed parameters, in the order of chunks.
        aliases: of these, their other names.
        plain: buffers that state_dict() has, and parameters that are not managed.
        names: of all of them, the first ones, by their id().
        is_whole: they are all of the engine's model.
    """

    params: dict[str, ManagedParam]
    aliases: dict[str, tuple[str, ...]]
    plain: dict[str, torch.Tensor]
    names: dict[int, str]
    is_whole: bool

    @classmethod
    def of(cls, engine: Engine, model: torch.nn.Module | None = None) -> ModelTensors:
        """Those of an engine's model now, or of a part of it, `model`."""
        model = engine.model if model is None else model
        names: dict[int, list[str]] = {}
        plain: dict[str, torch.Tensor] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
            if engine.params.known(param) is None:
                plain[name] = param.detach()
        for prefix, module in model.named_modules(remove_duplicate=False):
            for own_name, buffer in module._buffers.items():
                if buffer is not None and own_name not in module._non_persistent_buffers_set:
                    name = f"{prefix}.{own_name}" if prefix else own_name
                    names.setdefault(id(buffer), []).append(name)
                    plain[name] = buffer.detach()
        params, aliases = {}, {}
        for chunk_group in engine.chunk_groups:
            for m in chunk_group.members:
                if engine.params.known(m.param) is m and id(m.param) in names:
                    first, *others = names[id(m.param)]
                    params[first], aliases[first] = m, tuple(others)
        first_names = {key: found[0] for key, found in names.items()}
        return cls(params, aliases, plain, first_names, model is engine.model)


# The states of each rule, in the order of the optimizer state.
STATE_NAMES = {
    each.rule: each.state_names
    for each in (HybridAdam, HybridLion, HybridAdagrad, HybridSGD, HybridMuon)
}


DtypeOf = Callable[[ManagedParam], torch.dtype]


class OwnChunk:
    """What this rank saves of a chunk: of each part of a parameter the master, then its states.

    Attributes:
        names: of the chunk's parameters that are saved.
        chunk: the chunk.
        chunk_group: its chunk group.
        ranges: what is saved, in the order of values().
        with_states: the optimizer state is needed; else values are saved as they compute.
    """

    def __init__(
        self,
        engine: Engine,
        chunk_group: ChunkGroup,
        names: Mapping[ManagedParam, str],
        dtype_of: DtypeOf | None,
    ) -> None:
        self.names, self.chunk_group = names, chunk_group
        self.chunk = next(iter(names)).chunk
        self._by_tile = dict(parts_by_tile(self.chunk_group, names))
        self._stored = {m: _stored_param(engine, name, m, dtype_of) for m, name in names.items()}
        self.with_states = dtype_of is None or any(dtype_of(m) != m.dtype for m in names)
        self.ranges: list[Range] = [
            (key, part.in_param.start, part.in_param.stop)
            for parts in self._by_tile.values()
            for m, part in parts
            for key in self._stored[m]
        ]

    def values(self, tiles: HomeTiles) -> Iterator[torch.Tensor]:
        """The values of the ranges, flat, as they are stored, from the chunk's homes."""
        for tile in tiles.read(self.chunk):
            for m, part in self._by_tile.get(tile.number, ()):
                piece = make_piece(self.chunk_group, m, part, tile.values, tile.optim_state)
                stored = self._stored[m]
                found = [piece.master(), *(piece.states() if len(stored) > 1 else ())]
                for value, dtype in zip(found, stored.values(), strict=True):
                    yield value.to(dtype)


class EngineCheckpoint(StoredCheckpoint):
    """The model of an engine, with its optimizers, as far as it is this rank's.

    What is small is copied when this is made, and read by key. The shards of parameters and states
    are read from their homes, past the slots that compute uses, in any thread. From freeze() on a
    chunk does not change before it was read; one that training waits for comes next.

    Attributes:
        small: copies of tensors that are saved whole: this rank's own, then buffers, by key.
        rank: this rank's number, of `ranks`.
        model: the model's tensors.
    """

    kind = "model in training"

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[HybridOptimizer],
        extra: Extra | None = None,
        with_chunks: bool = True,
        part: torch.nn.Module | None = None,
        dtype_of: DtypeOf | None = None,
    ) -> None:
        """Copies what is small.

        Args:
            engine: has made the updates under way.
            optimizers: those whose options are saved.
            extra: as hetero.save() takes it; None: neither it nor random numbers are saved.
            with_chunks: False: what is small is read alone.
            part: the part of the engine's model that is saved. Default: all of it.
            dtype_of: of parameters alone, which are saved in this dtype. Optimizer state, seven
                times as much, is read only where that is not the one they compute in. Default:
                masters and states are saved.

        Raises:
            ValueError: something is no plain data, or of a dtype that data files cannot have.
        """
        super().__init__(Path())
        everyone, replicas = engine.world.everyone, engine.world.replicas
        self.rank, self.ranks = (0, 1) if everyone is None else (everyone.rank, everyone.size)
        self.model = model = ModelTensors.of(engine, part)
        own: list[torch.Tensor] = []
        records = _optimizer_records(optimizers, model.names, own)
        ranks = [] if extra is None else [pack_rank_data(extra, own)]
        small = {data_key(self.rank, i): t for i, t in enumerate(own)}
        tensors = _tensor_records(engine, model, dtype_of)
        tensors |= {key: TensorRecord(tuple(t.shape), t.dtype) for key, t in small.items()}
        small |= {master_key(name): t for name, t in model.plain.items()}
        self.small = {key: t.detach().cpu().clone() for key, t in small.items()}
        params = {
            name: ParamRecord(model.aliases[name], m.chunk.trainable, m.step)
            for name, m in model.params.items()
        }
        scale = engine.shared.loss_scale
        self.manifest = Manifest(
            step=max((param.step for param in params.values()), default=0),
            files={},
            tensors=tensors,
            params=params,
            buffers=list(model.plain),
            optimizers=records,
            loss_scale=dict(vars(scale)) if scale.dynamic else None,
            ranks=ranks,
        )
        names = {m: name for name, m in model.params.items() if with_chunks}
        # Of replicas, which have the same shards, each saves some chunks.
        count, mine = (1, 0) if replicas is None else (replicas.size, replicas.rank)
        own_chunks = [
            OwnChunk(engine, chunk_group, {m: names[m] for m in members}, dtype_of)
            for chunk_group, members in by_chunk(engine, names)[mine::count]
        ]
        self._chunks = {own.chunk: own for own in own_chunks if own.ranges}
        self._versions = {m: m.version for m in model.params.values()}
        self._snapshot = Snapshot(reversed(self._chunks))
        self._tiles: dict[int, HomeTiles] = {}

    def freeze(self) -> None:
        """See StoredCheckpoint. Writes of user code cannot be held back: versions show them."""
        for chunk_group in {each.chunk_group for each in self._chunks.values()}:
            chunk_group.updates.versions.snapshots.add(self._snapshot)

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """See StoredCheckpoint; of what is small."""
        return self.small[key].reshape(-1)[begin:end]

    def regions(self) -> Iterator[list[Range]]:
        """See StoredCheckpoint: what is small, the first rank's buffers, too, and each chunk."""
        small = self.small.items()
        yield [
            (key, 0, tensor.numel())
            for key, tensor in small
            if self.rank == 0 or key.startswith("data/")
        ]
        for own in self._chunks.values():
            yield own.ranges

    def contents(self, keys: Container[str]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """See StoredCheckpoint; chunks come first.

        Raises CheckpointError if user code has written to a parameter since this was made.
        """
        while (chunk := self._snapshot.take()) is not None:
            own, upcoming = self._chunks[chunk], self._snapshot.upcoming(chunk)
            self._require_unchanged(own)
            if upcoming is not None:
                self._tiles_of(self._chunks[upcoming]).expect(upcoming)
            values = own.values(self._tiles_of(own))
            for (key, begin, _), flat in zip(own.ranges, values, strict=True):
                if key in keys:
                    yield key, begin, flat
            self._require_unchanged(own)
            self._snapshot.copied(chunk)
        for key, begin, end in next(self.regions()):
            if key in keys:
                yield key, begin, self.read(key, begin, end)

    def _tiles_of(self, own: OwnChunk) -> HomeTiles:
        number = own.chunk.group_index
        if number not in self._tiles:
            self._tiles[number] = HomeTiles(own.chunk_group, own.with_states)
        return self._tiles[number]

    def _require_unchanged(self, own: OwnChunk) -> None:
        for m, name in own.names.items():
            if m.version != self._versions[m]:
                raise CheckpointError(
                    f"{name} was written to while it was saved, so the checkpoint is not made; "
                    f"write to parameters after Save.wait(), or save with blocking=True"
                )

    def close(self) -> None:
        """See StoredCheckpoint; training waits for nothing any more."""
        self._snapshot.end()
        while self._tiles:
            self._tiles.popitem()[1].close()


def finish_updates(engine: Engine) -> None:
    """Waits for the updates under way, and takes over what user code has written."""
    engine.steps.schedule.revoke_all()
    engine.steps.schedule.wait_all()
    engine.params.take_in_written(engine.params.managed.values())


def _stored_param(
    engine: Engine, name: str, managed: ManagedParam, dtype_of: DtypeOf | None
) -> dict[str, torch.dtype]:
    """Keys and dtypes of what is stored of a parameter, the master (or value) first.

    States are stored in the dtype that keeps them; those of 8 bits decoded, in fp32.
    """
    if dtype_of is not None:
        return {master_key(name): dtype_of(managed)}
    dtypes = engine.params.group(managed.chunk).dtypes
    if not managed.chunk.trainable:
        return {master_key(name): dtypes.torch_compute}
    kept = torch.bfloat16 if dtypes.state == "bf16" else torch.float32
    states = {state_key(name, state): kept for state in STATE_NAMES[dtypes.rule]}
    return {master_key(name): torch.float32, **states}


def _tensor_records(
    engine: Engine, model: ModelTensors, dtype_of: DtypeOf | None
) -> dict[str, TensorRecord]:
    records: dict[str, TensorRecord] = {}
    for name, m in model.params.items():
        for key, dtype in _stored_param(engine, name, m, dtype_of).items():
            records[key] = TensorRecord(tuple(m.param.shape), dtype)
    for name, tensor in model.plain.items():
        if tensor.dtype not in STORED_DTYPES:
            raise ValueError(f"{name} is of {tensor.dtype}, which safetensors files do not have")
        records[master_key(name)] = TensorRecord(tuple(tensor.shape), tensor.dtype)
    return records


def _optimizer_records(
    optimizers: Sequence[HybridOptimizer], names: dict[int, str], tensors: list[torch.Tensor]
) -> tuple[OptimizerRecord, ...]:
    """Options that are tensors go to `tensors`; `names` are those of parameters, by their id()."""
    found = []
    for each in optimizers:
        groups = []
        for number, group in enumerate(each.param_groups):
            options = {name: value for name, value in group.items() if name != "params"}
            packed = pack(options, f"param group {number}", tensors)
            params = tuple(names[id(p)] for p in group["params"] if id(p) in names)
            groups.append(GroupRecord(packed, params))
        kind, states = type(each).__name__, tuple(each.state_names)
        found.append(OptimizerRecord(kind, states, each.state_dtype, tuple(groups)))
    return tuple(found)
