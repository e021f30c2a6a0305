"""Saving a model in training, while training waits or beside it, in whatever format.

Small things (param groups, loss scale, random numbers, buffers, `extra`) are copied at the call,
after the updates under way. A thread then copies this rank's shards from their homes, past the
slots that compute uses, and writes them past the page cache. Nothing else is copied at once: code
that is about to change a chunk waits until the thread has it (Snapshot), and it is the next one
then. So forward and backward wait for nothing, and a step for what the disk has not managed during
them. Writes of user code to a resident parameter's memory cannot be held back; versions show them,
and the save is an error that names the parameter. A save that is waited for is the same.

Each rank writes its shards, of replicas each a part of the chunks. The ranks agree that all have
written, over connections of their own; then the first one writes what is left (the manifest) and
puts the folder in its place.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.checkpoint.checkpoint_write import CheckpointWrite, HeteroWrite
from hetero.checkpoint.engine_checkpoint import EngineCheckpoint, finish_updates
from hetero.checkpoint.folder import CheckpointFolder
from hetero.checkpoint.rank_data import Extra
from hetero.runtime.engine import Engine
from offload.disk.new_folder import NewFolder
from offload.errors import CheckpointError, HeteroError, StoreError
from offload.interrupts import uninterrupted
from offload.memory.operation import THREAD_PREFIX

Optimizers = HybridOptimizer | Sequence[HybridOptimizer] | None
SAME_CLASS: tuple[type[HeteroError], ...] = (CheckpointError, StoreError)  # on all ranks


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
    engine, optimizers = engine_and_optimizers(model, optimizer)
    engine.check_usable()
    folder, given = CheckpointFolder(path, keep), dict(extra or {})

    def make() -> HeteroWrite:
        state = EngineCheckpoint(engine, optimizers, given)
        io_engine = engine.config.debugging.io_engine
        return HeteroWrite(state, state.manifest, state.rank, state.ranks, io_engine)

    return save_into(engine, folder, f"save {folder.path}", make, blocking)


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


def engine_and_optimizers(
    model: torch.nn.Module, optimizer: Optimizers
) -> tuple[Engine, list[HybridOptimizer]]:
    """The engine that manages the model, and the optimizers as a list: all of its own, or none.

    Raises HeteroError, ValueError.
    """
    engine = engine_of_model(model)
    if optimizer is None:
        return engine, []
    optimizers = [optimizer] if isinstance(optimizer, HybridOptimizer) else list(optimizer)
    known = len(engine.steps.optimizers)
    if optimizers and len(optimizers) != known:
        raise ValueError(
            f"{len(optimizers)} optimizers are given, and the model has {known}; give all, in the "
            f"order of hetero.initialize()"
        )
    if any(each.engine is not engine for each in optimizers):
        raise ValueError("the optimizer is of another model")
    return engine, optimizers


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
        failure = self._failure
        if failure is not None:
            self.was_told = True
            # A copy: what is raised has the caller's frames, and with them perhaps the model.
            raise copy.copy(failure).with_traceback(failure.__traceback__) from failure.__cause__

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
        self.engine.backend.lead_threads()

        def run() -> None:
            failure: BaseException | None = None
            try:
                job()
            except BaseException as error:
                failure = error
                _clear_frames(error)
            finally:
                made.end(failure)

        threading.Thread(target=run, name=f"{THREAD_PREFIX}{self._noun}").start()
        return made


def _clear_frames(error: BaseException | None) -> None:
    """Frees what the frames of an error, and of those that led to it, hold; their places stay."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


_savers: weakref.WeakKeyDictionary[Engine, StateJobs] = weakref.WeakKeyDictionary()


@uninterrupted
def _begin(
    saves: StateJobs, folder: NewFolder, what: str, make: Callable[[], CheckpointWrite]
) -> Save:
    """See save_into()."""
    engine, training, beside = saves.engine, saves.engine.world, saves.world
    # As load() does, so that the checkpoint fits what it is of. What has no room for its optimizer
    # state, which no update has made, is saved frozen.
    with suppress(HeteroError):
        engine.steps.added_params.take_in_unfrozen()
    everyone = beside.everyone
    is_first = everyone is None or everyone.rank == 0

    def prepare() -> CheckpointWrite:
        if saves.last is not None and not saves.last.was_told:
            saves.last.wait()  # (the user of another rank may have been told)
        finish_updates(engine)
        write = make()
        if is_first:
            folder.begin()
        return write

    try:
        write = training.together(f"begin to {what}", prepare, SAME_CLASS)
        training.require_equal({"the files": write.digest}, "the exports")
    except BaseException:
        folder.abandon()
        raise
    write.stored.freeze()

    def write_part() -> bytes:
        folder.require_seen(beside.name)
        with folder.as_store_error(f"write {folder.noun}"), closing(write.stored):
            return write.write(folder.incomplete)

    def job() -> None:
        """Each rank writes its part into the folder, which then gets its name."""

        def complete() -> None:
            if is_first:
                with folder.as_store_error(f"complete {folder.noun}"):
                    write.finish(folder, parts)
                folder.complete()

        try:
            part = beside.together(what, write_part, SAME_CLASS)
            parts = [part] if everyone is None else everyone.all_gather_bytes(part, what)
            beside.together(f"{what} to its end", complete, SAME_CLASS)
        finally:
            write.stored.close()
            folder.abandon()

    return saves.start(folder.path, job)


def save_into(
    engine: Engine,
    folder: NewFolder,
    what: str,
    make: Callable[[], CheckpointWrite],
    blocking: bool = True,
) -> Save:
    """Writes the state of now into a folder, in a thread. All ranks call it.

    Args:
        engine: the model's.
        folder: the folder.
        what: what all ranks do, with a verb first.
        make: makes this rank's part, when no updates are under way.
        blocking: waits for the thread.

    Raises what this rank met, or another one; HeteroError if ranks would write different things.
    """
    if engine not in _savers:
        _savers[engine] = StateJobs(engine, "save")
    made = _begin(_savers[engine], folder, what, make)
    if blocking:
        made.wait()
    return made
