"""hetero.commit() and hetero.resume(): the commits of a model's durable state.

A start makes a new generation of files, and the old one goes when the new one has a commit: nothing
is changed in place that a second crash could lose. initialize() brings model and optimizer back,
and hetero.resume() what the loop has made since, because schedulers change rates as they are
constructed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.checkpoint.load import Checkpoint, load_from
from hetero.checkpoint.rank_data import Extra, LoopState, objects_loaded
from hetero.checkpoint.save import Save, engine_of_model
from hetero.durable.committer import Committer
from hetero.durable.state_folder import StateFolder
from hetero.durable.stored_commit import StoredCommit
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.engine import Engine
from offload.errors import HeteroError


class DurableState:
    """The durable state of an engine.

    Attributes:
        committer: makes its commits.
    """

    def __init__(
        self, engine: Engine, optimizers: Sequence[HybridOptimizer], folder: StateFolder
    ) -> None:
        """Brings the last commit back, if there is one; all ranks call it.

        The engine, which has its first values, owns `folder` from here on. Raises as hetero.load().
        """
        engine.notes.extend(folder.notes)
        self.committer = Committer(engine, optimizers, folder)
        self._restored: tuple[Checkpoint, LoopState] | None = None
        notes = tuple(folder.notes)
        if folder.last:
            try:
                checkpoint, loop_state = _restore(engine, optimizers, folder)
            except BaseException:
                folder.remove_own()
                raise
            self._restored = replace(checkpoint, notes=notes), loop_state
            # The files of the start before can go then.
            self.committer.begin(self._restored[0].extra).wait()
            self.committer.goes_on_from = self._restored[0]
        _states[engine] = self

    def resume(self, extra: Extra, world: ProcessGroups) -> Checkpoint | None:
        """As hetero.resume(), of the ranks of `world`."""
        if self._restored is None:
            return None
        checkpoint, loop_state = self._restored
        if self.committer.steps:
            raise HeteroError(
                f"hetero.resume() comes before the first step, and {self.committer.steps} were made"
            )
        with objects_loaded(extra, checkpoint.extra, world, "the last commit"):
            pass  # nothing else can refuse
        loop_state.bring_back(self.committer.optimizers())
        self.committer.goes_on_from = None
        return checkpoint


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
            "the model's state is not durable, so nothing can be committed; give durable=True to "
            "hetero.initialize(), or save checkpoints with hetero.save()"
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
    made = _state_of(model).committer.begin(dict(extra or {}))
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
