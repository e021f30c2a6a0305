"""Loading a checkpoint, whatever the ranks, the placement and the dtype that it was saved with.

Each rank reads the ranges that its own shards need, whatever shards they were saved from. All that
can be compared is compared before anything is changed. If a piece turns out to be damaged later,
the model is half loaded, and every use of it is an error until another checkpoint is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.api.whole_state import Piece, fill_parts, parts_by_tile
from hetero.checkpoint.data_reader import DataReader
from hetero.checkpoint.folder import find_checkpoint
from hetero.checkpoint.manifest import Manifest, check_state, read_manifest
from hetero.checkpoint.model_tensors import (
    STATE_NAMES,
    ModelTensors,
    data_key,
    master_key,
    state_key,
)
from hetero.checkpoint.plain_data import unpack
from hetero.checkpoint.rank_data import (
    Extra,
    LoopState,
    check_objects,
    check_random,
    objects_loaded,
    unpack_extra,
    unpack_random,
)
from hetero.checkpoint.save import Optimizers, check_optimizers, engine_of_model, listed
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from offload.errors import CheckpointError, StoreError
from offload.interrupts import uninterrupted

_LISTED = 5  # of what does not fit, in an error


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded.

    Attributes:
        path: its folder.
        step: the largest number of updates that a parameter had got.
        ranks: how many ranks saved it.
        extra: what hetero.save() was given as `extra`: values, and of objects their states. This
            rank's own if there are as many ranks as then, else the first one's.
        notes: of hetero.resume(), lines about what was not as the last start should have left it.
    """

    path: Path
    step: int
    ranks: int
    extra: Mapping[str, Any] = field(repr=False)
    notes: tuple[str, ...] = ()


@uninterrupted
def load(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Extra | None = None,
) -> Checkpoint:
    """Loads what hetero.save() has saved; all ranks must call it.

    Training goes on with the same bits as if it had not stopped, if there are as many ranks as
    then; whatever the policy, budgets, stage and chunk size. With another number of ranks each
    one's random numbers stay as they are. Another dtype rounds masters to its own parameters.

    Args:
        path: the checkpoint's folder; or one with checkpoints in it, of which the one with the
            largest numbers in its name is loaded.
        model: after hetero.initialize(), with the same parameters.
        optimizer: as to save(). Without it parameters alone are loaded, and the optimizer's states
            stay, masters excepted; random numbers stay, too.
        extra: by name, objects that get their state back (load_state_dict(), or a torch.Generator).

    Returns:
        What was loaded, with all of `extra`.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged; it says where. If values turn out
            to be damaged while they are loaded, the model is half loaded, and refuses to be used
            until another checkpoint is loaded.
        ValueError: it is of another model or optimizer. Nothing is changed.
        HeteroError: another rank met one of these.
    """
    engine = engine_of_model(model)
    optimizers = listed(optimizer)
    check_optimizers(engine, optimizers)

    def open_source() -> Source:
        found = find_checkpoint(Path(path))
        manifest = read_manifest(found)

        def open_reader() -> DataReader:
            engine_name = engine.config.debugging.io_engine
            try:
                return DataReader(found, manifest.files, manifest.tensors, engine_name)
            except StoreError as error:
                raise CheckpointError(f"{found} cannot be read: {error}") from error

        return Source(found, manifest, open_reader)

    return load_from(open_source, engine, optimizers, dict(extra or {}), str(path))[0]


class Reader(Protocol):
    """Gives the tensors of a checkpoint by their keys; all raise CheckpointError."""

    def expect(self, order: Iterator[tuple[str, int, int]]) -> None:
        """What read() is going to be asked for, so that it can be read ahead."""

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of a flat tensor, valid until the next call."""

    def whole(self, key: str) -> torch.Tensor:
        """A small tensor in its shape."""

    def close(self) -> None:
        """Frees memory and files; idempotent."""


@dataclass(frozen=True)
class Source:
    """What is loaded: its folder, a manifest, and what opens the tensors that it lists."""

    path: Path
    manifest: Manifest
    open_reader: Callable[[], Reader]


def load_from(
    open_source: Callable[[], Source],
    engine: Engine,
    optimizers: Sequence[HybridOptimizer],
    extra: Extra,
    what: str,
) -> tuple[Checkpoint, LoopState]:
    """load() of what `open_source` opens; `what` names it in errors."""
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints are little-endian, and this machine is not")
    with engine.params.loading(), ExitStack() as resources:
        engine.check_usable()
        failure: Exception | None = None
        try:
            loading = _Loading(open_source(), engine, optimizers, extra, what, resources)
        except Exception as error:
            failure = error
        whole = f"load {what}"
        if engine.world.is_on_several_machines:
            whole += ", which must be on a filesystem that all machines share"
        engine.world.all_or_none(failure, whole, (CheckpointError,))
        return loading.load()


class _Loading:
    """A checkpoint that fits the model."""

    def __init__(
        self,
        source: Source,
        engine: Engine,
        optimizers: Sequence[HybridOptimizer],
        extra: Extra,
        what: str,
        resources: ExitStack,
    ) -> None:
        """Compares, and reads what is small. Raises as load(), with nothing changed.

        `resources` close the reader.
        """
        self._engine, self._optimizers, self._objects = engine, optimizers, extra
        self._what = what
        self.path = source.path
        self._manifest = manifest = source.manifest
        engine.added_params.take_in_unfrozen()
        self._model = ModelTensors.of(engine)
        with_states = bool(optimizers and manifest.optimizers)
        _check_model(manifest, self._model, with_states)
        self._reader = source.open_reader()
        resources.callback(self._reader.close)
        everyone = engine.world.everyone
        rank, ranks = (0, 1) if everyone is None else (everyone.rank, everyone.size)
        of_rank = rank if ranks == len(manifest.ranks) else 0
        groups = [
            _groups(self._reader, manifest, number, optimizer, self._model)
            for number, optimizer in enumerate(self._optimizers_of(manifest))
        ]
        if with_states:
            self._check_states()

        def tensor(number: int) -> torch.Tensor:
            return own_tensor(self._reader, manifest, of_rank, number)

        found: dict[str, Any] = {}
        random: Mapping[str, Any] | None = None
        if manifest.ranks:  # (`hetero convert` knows of none)
            found = unpack_extra(manifest.ranks[of_rank], tensor)
        if ranks == len(manifest.ranks) and self._optimizers:
            random = unpack_random(manifest.ranks[of_rank], tensor)
            check_random(random)
        check_objects(extra, found)
        self._loop_state = LoopState(groups, random, found)
        self._plain = {name: self._reader.whole(master_key(name)) for name in self._model.plain}

    def _optimizers_of(self, manifest: Manifest) -> Sequence[HybridOptimizer]:
        if self._optimizers and len(self._optimizers) != len(manifest.optimizers):
            raise ValueError(
                f"{self.path} has {len(manifest.optimizers)} optimizers, and "
                f"{len(self._optimizers)} are given; without any, parameters alone are loaded"
            )
        return self._optimizers

    def _check_states(self) -> None:
        """Raises CheckpointError unless all states are there that will be loaded."""
        for name, m in self._model.params.items():
            if m.chunk.trainable:
                for state in STATE_NAMES[self._engine.params.group(m.chunk).dtypes.rule]:
                    check_state(self._manifest, name, state)

    def load(self) -> tuple[Checkpoint, LoopState]:
        """Changes objects of `extra`, which may refuse it, the model, the optimizers, all else."""
        loop_state = self._loop_state
        world = self._engine.world
        with objects_loaded(self._objects, loop_state.extra, world, self._what):
            self._load_model()
        loop_state.bring_back(self._optimizers)
        ranks = len(self._manifest.ranks)
        return Checkpoint(self.path, self._manifest.step, ranks, loop_state.extra), loop_state

    def _load_model(self) -> None:
        """Parameters, optimizer states and buffers. Raises CheckpointError."""
        engine, manifest = self._engine, self._manifest
        engine.params.begin_loading(str(self.path))
        with engine.world.telling_failures("hetero.load()"):
            self._load_params()
            for name, tensor in self._model.plain.items():
                tensor.copy_(self._plain[name])
        if self._optimizers:
            for m, name in self._names.items():
                if m.chunk.trainable:
                    m.step = manifest.params[name].step
            if manifest.loss_scale is not None and engine.loss_scale.dynamic:
                for field_name, value in manifest.loss_scale.items():
                    setattr(engine.loss_scale, field_name, value)
        engine.params.end_loading()

    @property
    def _names(self) -> dict[ManagedParam, str]:
        return {m: name for name, m in self._model.params.items()}

    def _load_params(self) -> None:
        names = self._names
        self._reader.expect(self._ranges(names))

        def fill(piece: Piece) -> None:
            self._fill(piece, names[piece.managed])

        failure = fill_parts(self._engine, names, fill, replaces=bool(self._optimizers))
        self._engine.world.all_or_none(failure, f"load {self._what}", (CheckpointError,))

    def _fill(self, piece: Piece, name: str) -> None:
        """A piece of a parameter gets what the checkpoint has. Raises CheckpointError."""
        begin, end = piece.part.in_param.start, piece.part.in_param.stop

        def read(key: str) -> torch.Tensor:
            return self._reader.read(key, begin, end).float()

        master = read(master_key(name))
        if self._optimizers and piece.optim_state is not None:
            states = STATE_NAMES[piece.optim_states.dtypes.rule]
            piece.set_states([read(state_key(name, state)) for state in states])
        piece.set_master(master.to(piece.values.device))

    def _ranges(self, names: Mapping[ManagedParam, str]) -> Iterator[tuple[str, int, int]]:
        """What write_parts() is going to ask for, in its order."""
        by_chunk: dict[tuple[int, int], list[ManagedParam]] = {}
        for m in names:
            by_chunk.setdefault((m.chunk.group_index, m.chunk.id), []).append(m)
        for members in by_chunk.values():
            chunk_group = self._engine.params.group(members[0].chunk)
            for _, parts in parts_by_tile(chunk_group, members):
                for m, part in parts:
                    where = part.in_param
                    yield master_key(names[m]), where.start, where.stop
                    if self._optimizers and m.chunk.trainable:
                        for state in STATE_NAMES[chunk_group.dtypes.rule]:
                            yield state_key(names[m], state), where.start, where.stop


def own_tensor(reader: Reader, manifest: Manifest, rank: int, number: int) -> torch.Tensor:
    """Tensor `number` of those that a rank alone had. Raises CheckpointError."""
    key = data_key(rank, number)
    if key not in manifest.tensors:
        raise CheckpointError(f"the checkpoint has no tensor {key!r}")
    return reader.whole(key)


def _check_model(manifest: Manifest, model: ModelTensors, with_states: bool) -> None:
    """Raises ValueError if the checkpoint is of another model."""
    wrong = []
    expected = {name: tuple(m.param.shape) for name, m in model.params.items()}
    expected |= {name: tuple(tensor.shape) for name, tensor in model.plain.items()}
    stored = {*manifest.params, *manifest.buffers}
    for name in sorted(set(expected) - stored):
        wrong.append(f"it lacks {name}, of shape {expected[name]}")
    # (Formats that do not know of ties may have further names of tied parameters.)
    tied = {name for others in model.aliases.values() for name in others}
    for name in sorted(stored - set(expected) - tied):
        shape = manifest.tensors[master_key(name)].shape
        wrong.append(f"it has {name}, of shape {shape}, which the model does not have")
    for name in sorted(stored & set(expected)):
        shape = manifest.tensors[master_key(name)].shape
        if shape != expected[name]:
            wrong.append(f"{name} has the shape {shape}, and in the model {expected[name]}")
    for name, m in model.params.items():
        param = manifest.params.get(name)
        if with_states and param is None and name in stored:
            wrong.append(f"{name} was no parameter that can be trained when it was saved")
        if with_states and param is not None and param.trained != m.chunk.trainable:
            now, then = ("trained", "frozen") if m.chunk.trainable else ("frozen", "trained")
            wrong.append(f"{name} is {now}, and was {then} when it was saved")
    if wrong:
        more = f"; and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise ValueError(
            f"the checkpoint is of another model: {'; '.join(wrong[:_LISTED])}{more}; build the "
            f"model as it was saved"
        )


def _groups(
    reader: Reader,
    manifest: Manifest,
    number: int,
    optimizer: HybridOptimizer,
    model: ModelTensors,
) -> list[dict[str, Any]]:
    """The options of the optimizer's param groups. Raises ValueError if it is another optimizer."""
    record = manifest.optimizers[number]
    if record.states != tuple(optimizer.state_names):
        raise ValueError(
            f"the checkpoint is of {record.name}, with the states {', '.join(record.states)}, and "
            f"the optimizer is {type(optimizer).__name__}, with {', '.join(optimizer.state_names)}"
        )
    if len(record.groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the checkpoint's {record.name} has {len(record.groups)} param groups, and the "
            f"optimizer has {len(optimizer.param_groups)}"
        )
    found = []
    pairs = zip(record.groups, optimizer.param_groups, strict=True)
    for index, (group, own) in enumerate(pairs):
        names = tuple(model.names[id(p)] for p in own["params"] if id(p) in model.names)
        # (States are by name: in which order a group has its parameters changes nothing.)
        if sorted(group.params) != sorted(names):
            pairs_of_names = zip(sorted(group.params), sorted(names), strict=False)
            other = next(
                (pair for pair in pairs_of_names if pair[0] != pair[1]),
                (f"{len(group.params)} parameters", f"{len(names)}"),
            )
            raise ValueError(
                f"param group {index} has {other[0]} in the checkpoint where the optimizer has "
                f"{other[1]}; make the param groups as they were"
            )
        options = unpack(
            group.options,
            f"param group {index}",
            lambda tensor: own_tensor(reader, manifest, 0, tensor),
        )
        if not isinstance(options, dict) or "params" in options:
            raise CheckpointError(f"param group {index} of the checkpoint is no group's options")
        optimizer.check_options({**own, **options}, f"in param group {index} of the checkpoint ")
        found.append(options)
    return found
