"""What a rank writes of a checkpoint: a region of its file for each chunk, and one for the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from hetero.api.optimizer import HybridOptimizer
from hetero.checkpoint.data_writer import DataWriter, Region, WrittenFile
from hetero.checkpoint.engine_checkpoint import EngineCheckpoint, OwnChunk, finish_updates
from hetero.checkpoint.manifest import Manifest, TensorRecord
from hetero.checkpoint.rank_data import Extra
from hetero.chunk_groups.home_tiles import HomeTiles
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.engine import Engine
from hetero.state.snapshot import Snapshot
from offload.errors import CheckpointError


class Contents:
    """This rank's part of a checkpoint of what is now.

    What is small is copied when this is made. Chunks are copied by write(), in another thread: from
    freeze() until release() nothing changes one before it is copied.
    """

    def __init__(self, engine: Engine, optimizers: Sequence[HybridOptimizer], extra: Extra) -> None:
        """Waits for the updates under way. Raises ValueError for what no checkpoint can have."""
        finish_updates(engine)
        everyone = engine.world.everyone
        self._state = state = EngineCheckpoint(engine, optimizers, extra)
        self.rank, ranks = state.rank, 1 if everyone is None else everyone.size
        self._file_name = f"rank-{self.rank:04}-of-{ranks:04}.safetensors"
        self._io_engine = engine.config.debugging.io_engine
        self._chunk_groups = list(engine.chunk_groups)
        self._small = {
            key: tensor.detach().cpu().clone()
            for key, tensor in state.small.items()
            if self.rank == 0 or key.startswith("data/")
        }
        self._chunks = {
            (each.chunk.group_index, each.chunk.id): each for each in state.chunks if each.ranges
        }
        self._versions = {m: m.version for m in state.model.params.values()}
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
        tensors = self._state.manifest.tensors
        regions = [Region([(f"{key}@0", t.dtype, t.numel()) for key, t in self._small.items()])]
        for own in self._chunks.values():
            entries = [
                (f"{key}@{begin}", tensors[key].dtype, end - begin)
                for key, begin, end in own.ranges
            ]
            regions.append(Region(entries))
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
                region = writer.region(number[key])
                for values in self._chunks[key].values(tiles[chunk.group_index]):
                    region.write(values)
                region.end()
                self._require_unchanged(self._chunks[key])
                self._snapshot.copied(chunk)
            region = writer.region(0)
            for tensor in self._small.values():
                region.write(tensor)
            region.end()
            self._written = writer.finish()

    def _require_unchanged(self, chunk: OwnChunk) -> None:
        for m, name in chunk.names.items():
            if m.version != self._versions[m]:
                raise CheckpointError(
                    f"{name} was written to while it was saved, so the checkpoint is not made; "
                    f"write to parameters after Save.wait(), or save with blocking=True"
                )

    def manifest(self, world: ProcessGroups) -> Manifest:
        """What the checkpoint has, once all ranks have written theirs. All ranks must call it."""
        assert self._written is not None
        own = self._state.manifest
        mine = {
            "name": self._file_name,
            "file": asdict(self._written),
            "tensors": {
                key: t.to_json() for key, t in own.tensors.items() if key.startswith("data/")
            },
            "data": own.ranks[0],
        }
        found = [mine]
        if world.everyone is not None:
            content = json.dumps(mine).encode()
            gathered = world.everyone.all_gather_bytes(content, "completing a checkpoint")
            found = [json.loads(each) for each in gathered]
        tensors = {key: t for key, t in own.tensors.items() if not key.startswith("data/")}
        for each in found:
            tensors |= {
                key: TensorRecord.of_json(tensor, key) for key, tensor in each["tensors"].items()
            }
        return replace(
            own,
            files={each["name"]: WrittenFile(**each["file"]) for each in found},
            tensors=tensors,
            ranks=[each["data"] for each in found],
        )
