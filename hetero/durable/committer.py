"""Commits: after a step, beside the next one, the state is made durable and a record says so.

Most of a large training's state is on NVMe anyway; a crash loses the knowledge of what lies where,
and half made steps. So a commit copies nothing that has its home there: the first change of a chunk
after a commit goes to its spare extents (ChunkVersions), later ones to the same place. A commit
waits for the pipeline's buffers, flushes the files and writes a record, and the ranks agree; the
record's second copy, over that of the commit before, and a second agreement follow. State that has
its home in RAM and has changed is copied to one of two extents in turn, beside the next forward and
backward. Homes may move between commits: what a commit refers to is freed only when the next one is
there (ScratchSpace.take_freed()). A failed commit ends training, because a loop that went on would
believe in a safety that is not there.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.checkpoint.engine_checkpoint import EngineCheckpoint
from hetero.checkpoint.load import Checkpoint
from hetero.checkpoint.rank_data import Extra
from hetero.checkpoint.save import Save, StateJobs
from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunks.layout import Chunk
from hetero.durable.record import Record, RecordFiles, StoredChunk, StoredGroup, StoredSlice
from hetero.durable.state_folder import StateFolder
from hetero.runtime.engine import Engine
from hetero.state.chunk_updates import CommitChunk, CommittedState, Snapshot
from hetero.state.managed_param import ManagedParam
from hetero.state.memory.scratch_space import COPIES
from offload._native import IoOp
from offload.disk.durable import check_named
from offload.errors import CheckpointError, HeteroError
from offload.interrupts import uninterrupted
from offload.memory.tiers import StateKind


@dataclass(frozen=True)
class _GroupCommit:
    """What a commit has of a chunk group, and what of it is written by the commit."""

    chunk_group: ChunkGroup
    chunks: Sequence[CommitChunk]
    names: Mapping[ManagedParam, str]
    writes: Mapping[Chunk, Sequence[tuple[ManagedParam, int]]]
    freed: Sequence[tuple[int, int]]

    @property
    def _committed(self) -> CommittedState:
        committed = self.chunk_group.updates.versions.committed
        assert committed is not None
        return committed

    def write(self, snapshot: Snapshot) -> None:
        """Returns when all of it is durable. Raises NativeIoError, CheckpointError."""
        group, under_way = self.chunk_group, list[tuple[CommitChunk, list[IoOp]]]()
        for each in self.chunks:
            if each.changed or each.copied:
                under_way.append((each, self._start(each)))
            if len(under_way) > 2:
                self._finish(snapshot, *under_way.pop(0))
        for each, ops in under_way:
            self._finish(snapshot, each, ops)
        disk = group.disk
        assert disk is not None
        disk.io.sync(disk.transfers.file)
        for member in disk.scratch.members:
            check_named(member.fd, member.path)

    def _start(self, each: CommitChunk) -> list[IoOp]:
        """Starts copying what has its home in memory."""
        updates, chunk = self.chunk_group.updates, each.chunk
        updates.wait_computed(chunk)
        ops: list[IoOp] = []
        for kind in each.copied:
            homes = self.chunk_group.memory.homes[kind]
            offset = each.offsets[kind]
            nbytes = self._committed.nbytes(chunk, kind)
            space = self.chunk_group.memory.scratch_space
            if homes.on_device(chunk):
                assert self.chunk_group.device is not None
                shard = homes.shard(chunk).view(torch.uint8)[:nbytes]
                self.chunk_group.device.home_copier.to_file(shard, offset)
            else:
                ops.append(space.write(homes.address(chunk, 0), nbytes, offset))
        return ops

    def _finish(self, snapshot: Snapshot, each: CommitChunk, ops: list[IoOp]) -> None:
        """The chunk's state is in the file; it may change if all of it is copied."""
        updates = self.chunk_group.updates
        updates.arenas.pipeline.flush(updates.chunks[each.chunk.id].first_key, each.chunk.slots)
        for op in ops:
            op.wait()
        for m, writes in self.writes.get(each.chunk, ()):
            if m.writes.count != writes:
                raise CheckpointError(
                    f"{m.name} was written to while it was committed; write to parameters before "
                    f"the commit, which hetero.commit() makes where a loop wants it "
                    f"(commit_every=0), or wait for it"
                )
        if not self._committed.is_in_file(each.chunk):
            snapshot.copied(each.chunk)

    def stored(self, folders: Sequence[str]) -> StoredGroup:
        """What the record says; `folders` are the set's, by place."""
        group = self.chunk_group
        disk, layout = group.disk, group.layout
        assert disk is not None
        scratch, chunks = disk.scratch, []
        for each in self.chunks:
            slices = tuple(
                StoredSlice(self.names[m], m.slice.offset, m.numel)
                for m in group.members
                if m.chunk is each.chunk and m in self.names
            )
            optim_state = each.offsets.get(StateKind.OPTIM_STATE)
            chunk = each.chunk
            param = each.offsets[StateKind.PARAM]
            chunks.append(StoredChunk(chunk.slots, chunk.trainable, slices, param, optim_state))
        stripes = scratch.stripes
        return StoredGroup(
            compute=group.dtypes.compute,
            rule=group.dtypes.rule,
            state=group.dtypes.state,
            tile_numel=layout.tile_numel,
            rank=layout.shard.rank,
            ranks=layout.shard.ranks,
            name=os.path.basename(scratch.members[0].path),
            places=tuple(folders.index(member.directory) for member in scratch.members),
            weights=tuple(map(stripes.pattern.count, range(stripes.members))),
            unit_bytes=stripes.unit_bytes,
            chunks=tuple(chunks),
        )

    def checksums(self, group: StoredGroup) -> Iterator[bytes]:
        """Those of the pages that stored() names, in pieces."""
        disk = self.chunk_group.disk
        assert disk is not None
        for _, offset, nbytes in group.pieces():
            yield disk.io.checksums(disk.transfers.file, offset, nbytes)


class Committer(StateJobs):
    """Makes the commits of a durable engine, one after the other.

    Attributes:
        number: of the last commit that was begun.
        steps: that were made since the start.
        goes_on_from: what the loop has not asked for yet (hetero.resume()).
    """

    def __init__(
        self, engine: Engine, optimizers: Sequence[HybridOptimizer], folder: StateFolder
    ) -> None:
        """Nothing is committed yet. With several ranks all must make one.

        `folder` is closed with the engine.
        """
        # (Not the optimizers, which the finalizer of their model ends.)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._every, self.steps = engine.config.commit_every, 0
        self.goes_on_from: Checkpoint | None = None
        self._folder = folder
        self._records = RecordFiles(folder.files)
        engine.lifetime.before_close.callback(folder.close)
        engine.lifetime.before_close.callback(self._records.close)
        super().__init__(engine, "commit")
        self.number = 0
        self._snapshot = Snapshot(())
        self._under_way: list[_GroupCommit] = []
        engine.watch.listeners.append(self._after_step)

    def optimizers(self) -> list[HybridOptimizer]:
        """Those of the model that are still there."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def finish(self) -> None:
        """See StateJobs; a step may have raised it, too."""
        if self.last is not None:
            self.last.was_told |= self._snapshot.was_told
        super().finish()

    def _after_step(self) -> None:
        """A step was made: each commit_every-th one is committed."""
        self.steps += 1
        if self._every and self.steps % self._every == 0:
            self.begin({})

    @uninterrupted
    def begin(self, extra: Extra) -> Save:
        """Starts the thread that commits the state of now.

        Raises what the commit before has met, after which there are no more; ValueError.
        """
        engine = self.engine
        if self.goes_on_from is not None:
            raise HeteroError(
                f"the training continues from {self.goes_on_from.path}, where "
                f"{self.goes_on_from.step} steps were made; call hetero.resume(model) before the "
                f"first step, which says so, or remove that folder to begin anew"
            )
        if self.last is not None:
            self.last.wait()
        for each in self._under_way:
            each.chunk_group.memory.scratch_space.reuse(each.freed)
        self._under_way = []
        failure: Exception | None = None
        record: Record | None = None
        self._snapshot = snapshot = Snapshot(())
        self.number += 1
        try:
            engine.steps.schedule.revoke_all()
            record, names = self._facts(engine, extra)
            by_group = [
                (group, group.updates.versions.committed.begin_commit())
                for group in engine.chunk_groups
                if group.updates.versions.committed is not None
            ]
            changed = (e.chunk for _, chunks in by_group for e in chunks if e.changed)
            self._snapshot = snapshot = Snapshot(changed)
            self._under_way = [
                _GroupCommit(
                    group,
                    chunks,
                    {m: name for m, name in names.items() if m.chunk.group_index == index},
                    _writes(group, chunks),
                    group.memory.scratch_space.take_freed(),
                )
                for index, (group, chunks) in enumerate(by_group)
            ]
            for group, _ in by_group:
                group.updates.versions.snapshots.add(snapshot)
        except Exception as error:
            failure = error
        groups = list(self._under_way)

        def job() -> None:
            try:
                self._commit(record, groups, snapshot, failure)
            except BaseException as error:
                # What the last durable commit has must stay: no update writes there any more.
                snapshot.fail(error)
                raise
            snapshot.end()

        made = self.start(self._records.folder, job)
        if failure is not None:
            made.wait()
        return made

    def _facts(self, engine: Engine, extra: Extra) -> tuple[Record, dict[ManagedParam, str]]:
        """What is small, as it is now; and the parameters' names."""
        files = self._folder.files
        state = EngineCheckpoint(engine, self.optimizers(), extra, with_chunks=False)
        record = Record(
            generation=files.generation,
            number=self.number,
            rank=files.rank,
            ranks=files.ranks,
            manifest=state.manifest,
            groups=(),
            small={key: t.detach().cpu().clone() for key, t in state.small.items()},
        )
        return record, {m: name for name, m in state.model.params.items()}

    def _commit(
        self,
        record: Record | None,
        groups: Sequence[_GroupCommit],
        snapshot: Snapshot,
        failure: Exception | None,
    ) -> None:
        """Writes everything. Raises what this rank met, or another one.

        The second copy of the record, over that of the commit before, is written when all ranks
        have the first one: a commit that all have is whole at any time.
        """

        def write_first() -> None:
            if failure is not None:
                raise failure
            for each in groups:
                each.write(snapshot)
            self._write_record(COPIES[0], record, groups)

        def write_second() -> None:
            self._write_record(COPIES[1], record, groups)
            self._folder.note_commit()

        self.world.together("commit a step", write_first, (CheckpointError,))
        self.world.together("commit a step", write_second, (CheckpointError,))
        self._folder.remove_older()

    def _write_record(
        self, copy: int, record: Record | None, groups: Sequence[_GroupCommit]
    ) -> None:
        """Writes a copy of the record. Raises StoreError."""
        assert record is not None
        stored = {each.stored(self._folder.folders): each for each in groups}
        whole = replace(record, groups=tuple(stored))
        self._records.write(copy, whole, lambda group: stored[group].checksums(group))


def _writes(
    group: ChunkGroup, chunks: Sequence[CommitChunk]
) -> dict[Chunk, list[tuple[ManagedParam, int]]]:
    """Of the chunks that are copied from memory, how often user code has written to each
    parameter."""
    copied = {each.chunk for each in chunks if each.copied}
    found: dict[Chunk, list[tuple[ManagedParam, Any]]] = {chunk: [] for chunk in copied}
    for m in group.members:
        if m.chunk in copied:
            found[m.chunk].append((m, m.writes.count))
    return found
