"""Saving a checkpoint, while training waits or beside it.

Small things (param groups, loss scale, random numbers, buffers, `extra`) are copied at the call,
after the updates under way. A thread then copies this rank's shards from their homes, past the
slots that compute uses, and writes them past the page cache. Nothing else is copied at once: code
that is about to change a chunk waits until the thread has it (Snapshot), and it is the next one
then. So forward and backward wait for nothing, and a step for what the disk has not managed during
them. Writes of user code to a resident parameter's memory cannot be held back; versions show them,
and the save is an error that names the parameter. A save that is waited for is the same.

Each rank writes one file, of replicas each a part of the chunks. The ranks agree that all have
written, over connections of their own; then the first one writes the manifest and puts the folder
in its place.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.checkpoint.checkpoint_write import HeteroWrite, write_together
from hetero.checkpoint.data_writer import DataWriter, Range
from hetero.checkpoint.engine_checkpoint import EngineCheckpoint, OwnChunk, finish_updates
from hetero.checkpoint.folder import CheckpointFolder
from hetero.checkpoint.rank_data import Extra
from hetero.chunk_groups.home_tiles import HomeTiles
from hetero.runtime.engine import Engine
from hetero.state.chunk_updates import Snapshot
from offload.errors import CheckpointError, HeteroError
from offload.interrupts import uninterrupted
from offload.memory.operation import THREAD_PREFIX

Optimizers = HybridOptimizer | Sequence[HybridOptimizer] | None


def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Extra | None = None,
    blocking: bool = True,
    keep: int | None = None,
) -> Save:
    """Saves a checkpoint from which hetero.load() goes on with the same bits; all ranks call it.

    It has masters, optimizer states, param groups, buffers, fp16's loss scale, the state of random
    numbers of each rank, and `extra`, but no gradients: call it between steps. It can be loaded by
    any number of ranks, with any policy, budget, stage, chunk size and dtype. Beside the budgets it
    takes a few chunks' memory.

    What was at `path` stays, whole, until the new checkpoint is whole. docs/formats.md says what is
    in the folder.

    Args:
        path: the checkpoint's folder; all ranks must see the same one.
        model: as hetero.initialize() returned it.
        optimizer: likewise, or the list; without it parameters alone are saved.
        extra: by name, schedulers, GradScaler, loaders and whatever else has state_dict(), or
            numbers, strings, tensors, lists and dicts. Each rank's own is kept.
        blocking: False: returns when updates under way are made; the rest goes on beside training,
            whose updates wait for the chunks that they change.
        keep: so many checkpoints stay, of those beside this one whose names differ from its in
            their numbers alone ("step-100", "step-200"). Default: all.

    Returns:
        The save; wait() for it if `blocking` is False. The next save, and engine.close(), do, too,
        and raise what it met.

    Raises:
        ValueError: `extra` has something else, or at `path` is no checkpoint. Nothing is written.
        CheckpointError: another process saves there, a rank does not see the folder, a parameter
            was written to meanwhile, or the last save, which went on, has failed.
        StoreError, NativeIoError: the files cannot be written; what was there before is as it was.
        HeteroError: another rank met one of these.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be 1 or more, not {keep!r}")
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints are little-endian, and this machine is not")
    engine = engine_of_model(model)
    engine.check_usable()
    optimizers = listed(optimizer)
    check_optimizers(engine, optimizers)
    made = _Saver.of(engine).begin(Path(path), optimizers, dict(extra or {}), keep)
    if blocking:
        made.wait()
    return made


def engine_of_model(model: torch.nn.Module) -> Engine:
    """The engine that manages the model. Raises HeteroError if there is none."""
    for param in model.parameters():
        engine: Engine | None = getattr(param, "_hetero_engine", None)
        if engine is not None and engine.lifetime.is_of(model):
            return engine
    raise HeteroError(
        "this model has no engine of its own; give the one that hetero.initialize() was given, "
        "after it, not a part of it or a wrapper"
    )


def listed(optimizer: Optimizers) -> list[HybridOptimizer]:
    """The optimizers."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, HybridOptimizer) else list(optimizer)


def check_optimizers(engine: Engine, optimizers: Sequence[HybridOptimizer]) -> None:
    """Raises ValueError unless they are all of the engine's optimizers, or none."""
    known = len(engine.steps.optimizers)
    if optimizers and len(optimizers) != known:
        raise ValueError(
            f"{len(optimizers)} optimizers are given, and the model has {known}; give all, in the "
            f"order of hetero.initialize()"
        )
    for optimizer in optimizers:
        if optimizer.engine is not engine:
            raise ValueError("the optimizer is of another model")


class Save:
    """A checkpoint that is being saved, or was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self.was_told = False  # the failure was raised

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the checkpoint is there, whole and durable, or `timeout_s` is over.

        Raises what save() says, and TimeoutError.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"{self.path} is not saved after {timeout_s} s and continues")
        if self._failure is not None:
            self.was_told = True
            raise self._failure

    def settle(self) -> None:
        """Until it has ended. Raises what wait() does, if nobody was told of it yet.

        Where another error is being handled, as at the end of a program, that is a warning.
        """
        self._done.wait()
        if self._failure is None or self.was_told:
            return
        if sys.exc_info()[1] is None:
            self.wait()
        self.was_told = True
        warnings.warn(f"what was being saved to {self.path} failed: {self._failure}", stacklevel=2)

    def end(self, failure: BaseException | None) -> None:
        """Called once, when nothing more is done."""
        self._failure = failure
        self._done.set()


class StateJobs:
    """The saves of an engine, or its commits: one after the other, each in a thread of its own.

    Attributes:
        last: the last one that was begun.
        world: all ranks, over connections of their own: messages must not mix with training's.
    """

    def __init__(self, engine: Engine, noun: str) -> None:
        """With several ranks all must make one; `noun` is for the threads' names."""
        # (Not the engine, which the finalizer of its model ends.)
        self._engine = weakref.ref(engine)
        self._noun = noun
        self.last: Save | None = None
        self.world = engine.world
        if engine.world.everyone is not None:
            self.world = engine.world.duplicate()
            engine.lifetime.before_close.callback(self.world.close)
        engine.lifetime.before_close.callback(self.finish)

    @property
    def engine(self) -> Engine:
        """The engine, which is open."""
        engine = self._engine()
        assert engine is not None
        return engine

    def finish(self) -> None:
        """Until the last one has ended. Raises what it met, if nobody was told of it yet."""
        if self.last is not None:
            self.last.settle()

    def start(self, path: Path, job: Callable[[], None]) -> Save:
        """Calls `job` in a new thread; what it raises is what the save to `path` has met."""
        self.last = made = Save(path)

        def run() -> None:
            failure: BaseException | None = None
            try:
                job()
            except BaseException as error:
                failure = error
            finally:
                made.end(failure)

        threading.Thread(target=run, name=f"{THREAD_PREFIX}{self._noun}").start()
        return made


_savers: weakref.WeakKeyDictionary[Engine, _Saver] = weakref.WeakKeyDictionary()


class _Saver(StateJobs):
    """Makes the saves of an engine."""

    @classmethod
    def of(cls, engine: Engine) -> _Saver:
        saver = _savers.get(engine)
        if saver is None:
            saver = _savers[engine] = cls(engine, "save")
        return saver

    @uninterrupted
    def begin(
        self,
        path: Path,
        optimizers: Sequence[HybridOptimizer],
        extra: Extra,
        keep: int | None,
    ) -> Save:
        """Starts the thread that saves the state of now."""
        engine = self.engine
        if self.last is not None and not self.last.was_told:
            self.last.wait()
        folder = CheckpointFolder(path, keep)

        def prepare() -> _LiveWrite:
            finish_updates(engine)
            write = _LiveWrite(EngineCheckpoint(engine, optimizers, extra), engine)
            if write.leads:
                folder.begin()
            return write

        try:
            write = engine.world.together(f"begin to save {path}", prepare, (CheckpointError,))
        except BaseException:
            folder.abandon()
            raise
        write.freeze()

        def job() -> None:
            try:
                what = f"save {folder.path}"
                write_together(self.world, folder, what, write, (CheckpointError,))
            finally:
                write.release()
                folder.abandon()

        return self.start(folder.path, job)


class _LiveWrite(HeteroWrite):
    """This rank's part of a checkpoint of a model that goes on training.

    What is small is copied when this is made. Chunks are copied by write(), in another thread: from
    freeze() until release() nothing changes one before it is copied.
    """

    def __init__(self, state: EngineCheckpoint, engine: Engine) -> None:
        everyone = engine.world.everyone
        self.leads, ranks = state.rank == 0, 1 if everyone is None else everyone.size
        io_engine = engine.config.debugging.io_engine
        super().__init__(state, state.manifest, state.rank, ranks, io_engine)
        self._chunk_groups = list(engine.chunk_groups)
        self._small = {
            key: tensor.detach().cpu().clone()
            for key, tensor in state.small.items()
            if self.leads or key.startswith("data/")
        }
        self._chunks = {
            (each.chunk.group_index, each.chunk.id): each for each in state.chunks if each.ranges
        }
        self._versions = {m: m.version for m in state.model.params.values()}
        self._snapshot = Snapshot(each.chunk for each in reversed(self._chunks.values()))

    def freeze(self) -> None:
        """From here on a chunk does not change before it is copied."""
        for chunk_group in self._chunk_groups:
            chunk_group.updates.versions.snapshots.add(self._snapshot)

    def release(self) -> None:
        """Training waits for nothing any more; idempotent."""
        self._snapshot.end()

    def write(self, folder: Path) -> bytes:
        """See CheckpointWrite; training waits for nothing after it."""
        try:
            return super().write(folder)
        finally:
            self.release()

    def regions(self) -> list[list[Range]]:
        """See HeteroWrite: what is small, and each chunk."""
        small = [(key, 0, tensor.numel()) for key, tensor in self._small.items()]
        return [small, *(own.ranges for own in self._chunks.values())]

    def fill(self, writer: DataWriter) -> None:
        """See HeteroWrite; raises CheckpointError, too: a chunk was written to meanwhile."""
        number = {key: i for i, key in enumerate(self._chunks, 1)}
        with ExitStack() as resources:
            tiles = [HomeTiles(chunk_group) for chunk_group in self._chunk_groups]
            for each in tiles:
                resources.callback(each.close)
            while (chunk := self._snapshot.take()) is not None:
                key = (chunk.group_index, chunk.id)
                self._require_unchanged(self._chunks[key])
                upcoming = self._snapshot.upcoming(chunk)
                if upcoming is not None:
                    tiles[upcoming.group_index].expect(upcoming)
                values = self._chunks[key].values(tiles[chunk.group_index])
                writer.write_region(number[key], values)
                self._require_unchanged(self._chunks[key])
                self._snapshot.copied(chunk)
            writer.write_region(0, self._small.values())

    def _require_unchanged(self, chunk: OwnChunk) -> None:
        for m, name in chunk.names.items():
            if m.version != self._versions[m]:
                raise CheckpointError(
                    f"{name} was written to while it was saved, so the checkpoint is not made; "
                    f"write to parameters after Save.wait(), or save with blocking=True"
                )
