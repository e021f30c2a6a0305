"""What a rank writes of a checkpoint: a region of its file for each chunk, and one for the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.api.whole_state import make_piece, parts_by_tile
from hetero.checkpoint.data_writer import DataWriter, Region, RegionWriter, WrittenFile
from hetero.checkpoint.manifest import Manifest, TensorRecord, dtype_name, tensor_record
from hetero.checkpoint.model_tensors import (
    ModelTensors,
    data_key,
    master_key,
    optimizer_records,
    stored_param,
    tensor_records,
)
from hetero.checkpoint.rank_data import Extra, pack_rank_data
from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunk_groups.home_tiles import HomeTiles
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from hetero.state.snapshot import Snapshot
from offload.errors import CheckpointError


class Contents:
    """This rank's part of a checkpoint of what is now.

    What is small is copied when this is made. Chunks are copied by write(), in another thread: from
    freeze() until release() nothing changes one before it is copied.
    """

    def __init__(self, engine: Engine, optimizers: Sequence[HybridOptimizer], extra: Extra) -> None:
        """Waits for the updates under way. Raises ValueError for what no checkpoint can have."""
        engine.schedule.revoke_all()
        engine.schedule.wait_all()
        engine.params.take_in_written(engine.params.managed.values())
        everyone = engine.world.everyone
        self.rank, ranks = (0, 1) if everyone is None else (everyone.rank, everyone.size)
        self._file_name = f"rank-{self.rank:04}-of-{ranks:04}.safetensors"
        self._io_engine = engine.config.debugging.io_engine
        self._chunk_groups = list(engine.chunk_groups)
        model = ModelTensors.of(engine)
        own: list[torch.Tensor] = []
        self._optimizers = optimizer_records(optimizers, model.names, own)
        self._rank_data = pack_rank_data(extra, own)
        self._own = [TensorRecord(tuple(t.shape), t.dtype) for t in own]
        self._params = model.param_records()
        self._plain = list(model.plain)
        scale = engine.loss_scale
        self._loss_scale = dict(vars(scale)) if scale.dynamic else None
        self._tensors = tensor_records(engine, model)
        small = [(data_key(self.rank, i), t) for i, t in enumerate(own)]
        if self.rank == 0:
            small += [(master_key(name), t) for name, t in model.plain.items()]
        self._small = [(key, t.detach().cpu().clone()) for key, t in small]
        chunks = [_ChunkContents(engine, names) for names in model.own_chunks(engine)]
        self._chunks = {
            (each.chunk.group_index, each.chunk.id): each for each in chunks if each.region.entries
        }
        self._versions = {m: m.version for m in model.params.values()}
        self._snapshot = Snapshot(each.chunk for each in reversed(self._chunks.values()))
        self._written: WrittenFile | None = None

    def freeze(self) -> None:
        """From here on a chunk does not change before it is copied."""
        for chunk_group in self._chunk_groups:
            chunk_group.updates.versions.snapshots.add(self._snapshot)

    def release(self) -> None:
        """Training waits for nothing any more; idempotent."""
        self._snapshot.end()

    def write(self, folder: Path) -> None:
        """Writes this rank's file. Raises CheckpointError, StoreError or NativeIoError."""
        small = Region([(f"{key}@0", t.dtype, t.numel()) for key, t in self._small])
        regions = [small, *(each.region for each in self._chunks.values())]
        number = {key: i for i, key in enumerate(self._chunks, 1)}
        with ExitStack() as resources:
            writer = DataWriter(folder / self._file_name, regions, self._io_engine)
            resources.callback(writer.close)
            tiles = [HomeTiles(chunk_group) for chunk_group in self._chunk_groups]
            for each in tiles:
                resources.callback(each.close)
            while (chunk := self._snapshot.take()) is not None:
                key = (chunk.group_index, chunk.id)
                self._require_unchanged(self._chunks[key])
                upcoming = self._snapshot.upcoming(chunk)
                if upcoming is not None:
                    tiles[upcoming.group_index].expect(upcoming)
                self._chunks[key].write(writer.region(number[key]), tiles[chunk.group_index])
                self._require_unchanged(self._chunks[key])
                self._snapshot.copied(chunk)
            region = writer.region(0)
            for _, tensor in self._small:
                region.write(tensor)
            region.end()
            self._written = writer.finish()

    def _require_unchanged(self, chunk: _ChunkContents) -> None:
        for m, name in chunk.names.items():
            if m.version != self._versions[m]:
                raise CheckpointError(
                    f"{name} was written to while it was saved, so the checkpoint is not made; "
                    f"write to parameters after Save.wait(), or save with blocking=True"
                )

    def manifest(self, world: ProcessGroups) -> Manifest:
        """What the checkpoint has, once all ranks have written theirs. All ranks must call it."""
        assert self._written is not None
        mine = {
            "name": self._file_name,
            "file": asdict(self._written),
            "tensors": [[dtype_name(t.dtype), *t.shape] for t in self._own],
            "data": self._rank_data,
        }
        found = [mine]
        if world.everyone is not None:
            content = json.dumps(mine).encode()
            gathered = world.everyone.all_gather_bytes(content, "completing a checkpoint")
            found = [json.loads(each) for each in gathered]
        own = {
            data_key(rank, i): tensor_record(data_key(rank, i), tensor)
            for rank, each in enumerate(found)
            for i, tensor in enumerate(each["tensors"])
        }
        return Manifest(
            step=max((param.step for param in self._params.values()), default=0),
            files={each["name"]: WrittenFile(**each["file"]) for each in found},
            tensors={**self._tensors, **own},
            params=self._params,
            buffers=self._plain,
            optimizers=self._optimizers,
            loss_scale=self._loss_scale,
            ranks=[each["data"] for each in found],
        )


class _ChunkContents:
    """What this rank writes of a chunk: of each part of a parameter the master, then its states."""

    def __init__(self, engine: Engine, names: Mapping[ManagedParam, str]) -> None:
        """`names` are those of the chunk's parameters that are saved."""
        self.names = names
        self.chunk = next(iter(names)).chunk
        self._chunk_group: ChunkGroup = engine.params.group(self.chunk)
        self._by_tile = dict(parts_by_tile(self._chunk_group, names))
        self._stored = {m: stored_param(engine, name, m) for m, name in names.items()}
        entries: list[tuple[str, torch.dtype, int]] = []
        for parts in self._by_tile.values():
            for m, part in parts:
                stored = self._stored[m]
                for key, dtype in zip(stored.keys, stored.dtypes, strict=True):
                    entries.append((f"{key}@{part.in_param.start}", dtype, part.numel))
        self.region = Region(entries)

    def write(self, writer: RegionWriter, tiles: HomeTiles) -> None:
        """Writes the region from the chunk's homes."""
        for tile in tiles.read(self.chunk):
            for m, part in self._by_tile.get(tile.number, ()):
                piece = make_piece(self._chunk_group, m, part, tile.values, tile.optim_state)
                found: list[Any] = [piece.master()]
                if piece.optim_state is not None:
                    found += piece.states()
                for value, dtype in zip(found, self._stored[m].dtypes, strict=True):
                    writer.write(value.to(dtype))
        writer.end()
