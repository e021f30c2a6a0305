"""hetero.commit() and hetero.last_commit(): the commits of a model's durable state."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.checkpoint.load import Checkpoint
from hetero.checkpoint.rank_data import Extra
from hetero.checkpoint.save import Save, engine_of_model
from hetero.durable.committer import Committer
from hetero.durable.restore import restore
from hetero.durable.state_folder import StateFolder
from hetero.runtime.engine import Engine
from offload.errors import HeteroError


class DurableState:
    """The durable state of an engine.

    Attributes:
        committer: makes its commits.
        restored: the commit that training goes on from; None if it has begun.
    """

    def __init__(
        self, engine: Engine, optimizers: Sequence[HybridOptimizer], folder: StateFolder
    ) -> None:
        """Brings the last commit back, if there is one; all ranks call it.

        The engine, which has its first values, owns `folder` from here on. Raises as hetero.load().
        """
        engine.notes.extend(folder.notes)
        self.committer = Committer(engine, optimizers, folder)
        self.restored: Checkpoint | None = None
        if folder.last:
            try:
                self.restored = restore(engine, optimizers, folder)
            except BaseException:
                folder.remove_own()
                raise
            # The files of the start before can go then.
            self.committer.begin(self.restored.extra).wait()
        _states[engine] = self


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
        extra: as hetero.save() takes it; hetero.last_commit() gives it back.
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


def last_commit(model: torch.nn.Module) -> Checkpoint | None:
    """The commit that hetero.initialize() brought back, or None if the training has just begun.

    Its `step` is the number of updates that were made, its `extra` what hetero.commit() was given:
    of objects their states, for load_state_dict().
    """
    return _state_of(model).restored
