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

A start makes a new generation of files, and the old one goes when the new one has a commit: nothing
is changed in place that a second crash could lose. initialize() brings model and optimizer back,
and hetero.resume() what the loop has made since, because schedulers change rates as they are
constructed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.checkpoint.engine_checkpoint import EngineCheckpoint
from hetero.checkpoint.load import Checkpoint, load_from
from hetero.checkpoint.rank_data import Extra, LoopState, objects_loaded
from hetero.checkpoint.save import Save, StateJobs, engine_of_model
from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunks.layout import Chunk
from hetero.durable.record import Record, RecordFiles, StoredChunk, StoredGroup, StoredSlice
from hetero.durable.state_folder import StateFolder
from hetero.durable.stored_commit import StoredCommit
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.engine import Engine
from hetero.state.chunk_updates import CommitChunk, Snapshot
from hetero.state.managed_param import ManagedParam
from hetero.state.state_files import COPIES
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
            nbytes = chunk.slots * self.chunk_group.memory.tile_bytes[kind]
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
        if not updates.versions.in_file(each.chunk):
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


class DurableState(StateJobs):
    """The durable state of an engine: its commits, one after the other, and the one it began from.

    Attributes:
        number: of the last commit that was begun.
        steps: that were made since the start.
    """

    def __init__(
        self, engine: Engine, optimizers: Sequence[HybridOptimizer], folder: StateFolder
    ) -> None:
        """Brings the last commit back, if there is one; all ranks call it.

        The engine, which has its first values, owns `folder` from here on. Raises as hetero.load().
        """
        # (Not the optimizers, which the finalizer of their model ends.)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._every, self.steps = engine.config.commit_every, 0
        self._folder = folder
        self._records = RecordFiles(folder.files)
        engine.lifetime.before_close.callback(folder.close)
        engine.lifetime.before_close.callback(self._remove_unless_committed)
        engine.lifetime.before_close.callback(self._records.close)
        self.number = 0
        super().__init__(engine, "commit")
        self._snapshot = Snapshot(())
        self._under_way: list[_GroupCommit] = []
        engine.notes.extend(folder.notes)
        self._restored: tuple[Checkpoint, LoopState] | None = None
        self._was_resumed = True  # the loop has asked for what was restored, if anything was
        if folder.last:
            try:
                checkpoint, loop_state = _restore(engine, optimizers, folder)
            except BaseException:
                folder.remove_own()
                raise
            self._restored = replace(checkpoint, notes=tuple(folder.notes)), loop_state
            # The files of the start before can go then.
            self.begin(checkpoint.extra).wait()
            self._was_resumed = False
        engine.watch.listeners.append(self._after_step)
        _states[engine] = self

    def resume(self, extra: Extra, world: ProcessGroups) -> Checkpoint | None:
        """As hetero.resume(), of the ranks of `world`."""
        if self._restored is None:
            return None
        checkpoint, loop_state = self._restored
        if self.steps:
            raise HeteroError(
                f"hetero.resume() comes before the first step, and {self.steps} were made"
            )
        with objects_loaded(extra, checkpoint.extra, world, "the last commit"):
            pass  # nothing else can refuse
        loop_state.bring_back(self.optimizers())
        self._was_resumed = True
        return checkpoint

    def optimizers(self) -> list[HybridOptimizer]:
        """Those of the model that are still there."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def finish(self) -> None:
        """See StateJobs; a step may have raised it, too."""
        if self.last is not None:
            self.last.was_told |= self._snapshot.was_told
        super().finish()

    def _remove_unless_committed(self) -> None:
        """The next start has no use for the files of one that has begun no commit."""
        if self.number == 0:
            self._folder.remove_own()

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
        if self._restored is not None and not self._was_resumed:
            checkpoint, _ = self._restored
            raise HeteroError(
                f"the training continues from {checkpoint.path}, where {checkpoint.step} steps "
                f"were made; call hetero.resume(model) before the first step, which says so, or "
                f"remove that folder to begin anew"
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
                (group, group.updates.versions.begin_commit())
                for group in engine.chunk_groups
                if group.updates.versions.is_durable
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
            small=state.small,
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


def _restore(
    engine: Engine, optimizers: Sequence[HybridOptimizer], folder: StateFolder
) -> tuple[Checkpoint, LoopState]:
    """Loads the last commit in the folder, whatever its ranks and placement; all ranks call it.

    Raises as hetero.load(): ValueError if it is of another model or optimizer.
    """
    path, io_engine = Path(folder.folders[0]), engine.config.debugging.io_engine
    try:
        return load_from(
            lambda: StoredCommit(path, folder.last, io_engine),
            engine,
            optimizers,
            {},
            "the last commit",
        )
    except ValueError as error:
        raise ValueError(
            f"{path} has the durable state of another training: {error}; a new one needs another "
            f"nvme_path, or this folder removed"
        ) from error


_states: weakref.WeakKeyDictionary[Engine, DurableState] = weakref.WeakKeyDictionary()


def _state_of(model: torch.nn.Module) -> DurableState:
    state = _states.get(engine_of_model(model))
    if state is None:
        raise HeteroError(
            "the model's state is not durable, so it has no commits; give durable=True to "
            "hetero.initialize(), or use checkpoints: hetero.save() and hetero.load()"
        )
    return state


def commit(model: torch.nn.Module, *, extra: Extra | None = None, blocking: bool = False) -> Save:
    """Commits the state of now: a training that starts again goes on from here.

    For loops with more than the model and its optimizer to bring back, such as a scheduler or a
    position in the data: give commit_every=0 to hetero.initialize(), and call this where the loop
    is between two iterations. All ranks call it. It costs what a commit of step() costs: most of
    the state is on NVMe already.

    Args:
        model: as hetero.initialize() returned it, with durable=True.
        extra: as hetero.save() takes it; hetero.resume() gives it back.
        blocking: True: returns when the commit is durable on all ranks. Default: it goes on beside
            the next iteration, whose updates wait for it; the next commit, and engine.close(), do.

    Returns:
        The commit; wait() for it.

    Raises:
        HeteroError: the engine has no durable state, or another rank met one of these.
        ValueError: `extra` has something that cannot be kept.
        CheckpointError: a parameter was written to while it was committed.
        StoreError, NativeIoError: the files cannot be written. After any of these, here or in a
            later call, there are no more commits and steps; the next start goes on from the last
            commit that was durable.
    """
    engine = engine_of_model(model)
    engine.check_usable()
    engine.params.take_in_written(engine.params.managed.values())
    made = _state_of(model).begin(dict(extra or {}))
    if blocking:
        made.wait()
    return made


def resume(model: torch.nn.Module, *, extra: Extra | None = None) -> Checkpoint | None:
    """Says what commit hetero.initialize() has brought back, and brings the loop's own state back.

    Every loop with durable=True calls it, on all ranks, when all it needs is made, and before the
    first step: it begins where that commit was made. What the constructors of schedulers have
    changed since, options of param groups, and random numbers are as they were committed then.

    Args:
        model: as hetero.initialize() returned it, with durable=True.
        extra: by name, objects that hetero.commit() was given, and that get their state back
            (load_state_dict(), or a torch.Generator).

    Returns:
        The commit; its `step` is the number of updates that were made, and `extra` what
        hetero.commit() was given: of objects their states; `notes` say what of the state was
        damaged or incomplete, as they did on stderr. None if the training has just begun.

    Raises:
        HeteroError: the model's state is not durable, or a step was made already.
        ValueError: the commit has none of that name. CheckpointError: it has another kind of state.
    """
    world = engine_of_model(model).world
    return _state_of(model).resume(dict(extra or {}), world)
