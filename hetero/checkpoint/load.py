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
from typing import Any

import torch

from hetero.api.loaded_state import group_options
from hetero.api.optimizer import HybridOptimizer
from hetero.api.whole_state import Piece, by_chunk, fill_parts, parts_by_tile
from hetero.checkpoint.data_writer import Range
from hetero.checkpoint.engine_checkpoint import STATE_NAMES, ModelTensors
from hetero.checkpoint.folder import find_checkpoint
from hetero.checkpoint.hetero_checkpoint import HeteroCheckpoint
from hetero.checkpoint.manifest import OptimizerRecord, check_state, master_key, state_key
from hetero.checkpoint.plain_data import unpack
from hetero.checkpoint.rank_data import (
    Extra,
    LoopState,
    check_random,
    objects_loaded,
    unpack_extra,
    unpack_random,
)
from hetero.checkpoint.save import SAME_CLASS, Optimizers, engine_and_optimizers
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from offload.errors import CheckpointError
from offload.interrupts import uninterrupted

_LISTED = 20  # of what does not fit, in an error, of each kind


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
    engine, optimizers = engine_and_optimizers(model, optimizer)

    def open_stored() -> StoredCheckpoint:
        return HeteroCheckpoint(find_checkpoint(Path(path)), engine.config.debugging.io_engine)

    return load_from(open_stored, engine, optimizers, dict(extra or {}), str(path))[0]


def load_from(
    open_stored: Callable[[], StoredCheckpoint],
    engine: Engine,
    optimizers: Sequence[HybridOptimizer],
    extra: Extra,
    what: str,
    part: torch.nn.Module | None = None,
) -> tuple[Checkpoint, LoopState]:
    """load() of what `open_stored` opens, into a `part` of the engine's model, or all of it.

    `what` names it in errors, alike on all ranks.
    """
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints are little-endian, and this machine is not")
    with engine.params.loading(), ExitStack() as resources:
        engine.check_usable()
        whole = f"load {what}"
        if engine.world.is_on_several_machines:
            whole += ", which must be on a filesystem that all machines share"

        def compare() -> tuple[_Loading, str]:
            stored = resources.enter_context(open_stored())
            model = ModelTensors.of(engine, part)
            return _Loading(stored, engine, model, optimizers, extra, what), stored.digest

        engine.steps.added_params.take_in_unfrozen()  # by all ranks, also if one cannot read
        loading, digest = engine.world.together(whole, compare, SAME_CLASS)
        engine.world.require_equal({"its tensors": digest}, "the folders of a checkpoint")
        return loading.load()


class _Loading:
    """A checkpoint that fits the model."""

    def __init__(
        self,
        stored: StoredCheckpoint,
        engine: Engine,
        model: ModelTensors,
        optimizers: Sequence[HybridOptimizer],
        extra: Extra,
        what: str,
    ) -> None:
        """Compares, and reads what is small. Raises as load(), with nothing changed."""
        self._engine, self._optimizers, self._objects = engine, optimizers, extra
        self._what, self._stored = what, stored
        self._model = model
        self._manifest = manifest = stored.manifest
        with_states = bool(optimizers and manifest.optimizers)
        self._stored_names = names = _names_in(stored, model, with_states)
        self._names = {m: names[name] for name, m in model.params.items() if name in names}
        stored.open()
        everyone = engine.world.everyone
        rank, ranks = (0, 1) if everyone is None else (everyone.rank, everyone.size)
        of_rank = rank if ranks == len(manifest.ranks) else 0
        groups = self._group_options()
        for m, name in self._names.items() if with_states else ():
            if m.chunk.trainable:
                for state in STATE_NAMES[engine.params.group(m.chunk).dtypes.rule]:
                    check_state(manifest, name, state)

        def tensor(number: int) -> torch.Tensor:
            return stored.own_tensor(of_rank, number)

        found: dict[str, Any] = {}
        random: Mapping[str, Any] | None = None
        if manifest.ranks:  # (other formats know of none)
            found = unpack_extra(manifest.ranks[of_rank], tensor)
        if ranks == len(manifest.ranks) and self._optimizers:
            random = unpack_random(manifest.ranks[of_rank], tensor)
            check_random(random)
        self._loop_state = LoopState(groups, random, found)
        plain = {name: names[name] for name in model.plain if name in names}
        self._plain = {name: stored.whole(master_key(each)) for name, each in plain.items()}

    def _group_options(self) -> list[list[dict[str, Any]]]:
        """The options of the optimizers' param groups. Raises ValueError if they do not fit."""
        own = [
            [
                [self._model.names[id(p)] for p in group["params"] if id(p) in self._model.names]
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]
        records = self._stored.optimizers_of(own)
        if own and len(own) != len(records):
            raise ValueError(
                f"{self._stored.path} has {len(records)} optimizers, and {len(own)} are given; "
                f"without any, parameters alone are loaded"
            )
        return [
            self._options_of(record, optimizer, names)
            for record, optimizer, names in zip(records, self._optimizers, own, strict=False)
        ]

    def _options_of(
        self,
        record: OptimizerRecord,
        optimizer: HybridOptimizer,
        names_of: Sequence[Sequence[str]],
    ) -> list[dict[str, Any]]:
        """The options of param groups with these names. Raises ValueError if it is another one."""
        if record.states != tuple(optimizer.state_names):
            raise ValueError(
                f"the checkpoint is of {record.name}, with the states {', '.join(record.states)}, "
                f"and the optimizer is {type(optimizer).__name__}, with "
                f"{', '.join(optimizer.state_names)}"
            )
        if len(record.groups) != len(optimizer.param_groups):
            raise ValueError(
                f"the checkpoint's {record.name} has {len(record.groups)} param groups, and the "
                f"optimizer has {len(optimizer.param_groups)}"
            )
        found = []
        each = zip(record.groups, optimizer.param_groups, names_of, strict=True)
        for index, (group, own, names) in enumerate(each):
            # (States are by name: in which order a group has its parameters changes nothing.)
            theirs, ours = sorted(group.params), sorted(self._stored_names[n] for n in names)
            if theirs != ours:
                other = next(
                    (pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]),
                    (f"{len(theirs)} parameters", f"{len(ours)}"),
                )
                raise ValueError(
                    f"param group {index} has {other[0]} in the checkpoint where the optimizer has "
                    f"{other[1]}; make the param groups as they were"
                )
            options = unpack(
                group.options,
                f"param group {index}",
                lambda number: self._stored.own_tensor(0, number),
            )
            if not isinstance(options, dict) or "params" in options:
                raise CheckpointError(
                    f"param group {index} of the checkpoint is no group's options"
                )
            if options:  # (DeepSpeed's universal format has none; all of the optimizer's stay)
                name, rule = f"param group {index} of the checkpoint", type(optimizer).__name__
                options = group_options(options, own, optimizer.option_names, name, rule)
                optimizer.check_options(options, f"in {name} ")
            found.append(options)
        return found

    def load(self) -> tuple[Checkpoint, LoopState]:
        """Changes objects of `extra`, which may refuse it, the model, the optimizers, all else."""
        loop_state = self._loop_state
        world = self._engine.world
        with objects_loaded(self._objects, loop_state.extra, world, self._what):
            self._load_model()
        loop_state.bring_back(self._optimizers)
        ranks = len(self._manifest.ranks)
        made = Checkpoint(self._stored.path, self._manifest.step, ranks, loop_state.extra)
        return made, loop_state

    def _load_model(self) -> None:
        """Parameters, optimizer states and buffers. Raises CheckpointError."""
        engine, manifest, names = self._engine, self._manifest, self._names
        # (What is loaded into a part of a model mends no other part.)
        model = self._model
        is_whole = model.is_whole and self._stored_names.keys() >= {*model.params, *model.plain}
        was_half_loaded = engine.params.begin_loading(str(self._stored.path))
        with engine.world.telling_failures("hetero.load()"):
            failure = self._fill_params()
        # (Not in the block: who told that it failed makes no more operations.)
        engine.world.all_or_none(failure, f"load {self._what}", SAME_CLASS)
        for name, values in self._plain.items():
            self._model.plain[name].copy_(values)
        if self._optimizers:
            for m, name in names.items():
                if m.chunk.trainable:
                    m.step = manifest.params[name].step
            if manifest.loss_scale is not None and engine.shared.loss_scale.dynamic:
                for field_name, value in manifest.loss_scale.items():
                    setattr(engine.shared.loss_scale, field_name, value)
        if is_whole or not was_half_loaded:
            engine.params.end_loading()

    def _fill_params(self) -> Exception | None:
        """Returns what this rank met, as fill_parts() does."""
        names = self._names
        values = self._stored.values(self._ranges(names))

        def fill(piece: Piece) -> None:
            self._fill(piece, names[piece.managed], values)

        return fill_parts(self._engine, names, fill, replaces=bool(self._optimizers))

    def _fill(
        self, piece: Piece, name: str, values: Iterator[tuple[str, int, torch.Tensor]]
    ) -> None:
        """A piece of a parameter gets what the checkpoint has. Raises CheckpointError."""

        def read(key: str) -> torch.Tensor:
            found, begin, flat = next(values)
            assert (found, begin) == (key, piece.part.in_param.start), (found, begin, key)
            return flat.float()

        master = read(master_key(name))
        if self._optimizers and piece.optim_state is not None:
            states = STATE_NAMES[piece.optim_states.dtypes.rule]
            piece.set_states([read(state_key(name, state)) for state in states])
        piece.set_master(master.to(piece.values.device))

    def _ranges(self, names: Mapping[ManagedParam, str]) -> Iterator[list[Range]]:
        """What fill_parts() is going to ask for, in its order."""
        for chunk_group, members in by_chunk(self._engine, names):
            found: list[Range] = []
            for _, parts in parts_by_tile(chunk_group, members):
                for m, part in parts:
                    keys = [master_key(names[m])]
                    if self._optimizers and m.chunk.trainable:
                        states = STATE_NAMES[chunk_group.dtypes.rule]
                        keys += [state_key(names[m], state) for state in states]
                    where = part.in_param
                    found += [(key, where.start, where.stop) for key in keys]
            yield found


def _names_in(stored: StoredCheckpoint, model: ModelTensors, with_states: bool) -> dict[str, str]:
    """The checkpoint's names of the model's tensors. Raises ValueError with all that does not fit.

    `with_states`: optimizer states are loaded, too.
    """
    manifest = stored.manifest
    other: list[str] = []
    lacking: list[str] = []
    frozen: list[str] = []
    expected = {name: m.param for name, m in model.params.items()} | model.plain
    found = {*manifest.params, *manifest.buffers}
    trained = {name for name, param in manifest.params.items() if param.trained}
    names: dict[str, str] = {}
    for name, tensor in expected.items():
        shape, m = tuple(tensor.shape), model.params.get(name)
        # (Formats that do not know of ties have any of the names of a tied parameter, or all.)
        known = [each for each in (name, *model.aliases.get(name, ())) if each in found]
        if not known:
            lacking += [] if name in stored.may_lack else [f"{name}: {shape}"]
            continue
        names[name] = next((each for each in known if each in trained), known[0])
        record = manifest.tensors[master_key(names[name])]
        fits = torch.can_cast(record.dtype, tensor.dtype)
        if record.shape != shape:
            other.append(f"{name}: {record.shape} in the checkpoint, {shape} in the model")
        elif not (fits if m is None else record.dtype.is_floating_point):
            other.append(f"{name}: {record.dtype} in the checkpoint, {tensor.dtype} in the model")
        param = manifest.params.get(names[name])
        if not with_states or m is None:
            continue
        if param is None:
            frozen.append(f"{name}: no parameter that can be trained in the checkpoint")
        elif not param.step and not m.chunk.trainable:
            pass  # no update has made a state of it, whichever the checkpoint calls it
        elif param.trained != m.chunk.trainable and stored.knows_frozen:
            now, then = ("trained", "frozen") if m.chunk.trainable else ("frozen", "trained")
            frozen.append(f"{name}: {then} in the checkpoint, {now} in the model")
    tied = {name for others in model.aliases.values() for name in others}
    more = [
        f"{name}: {manifest.tensors[master_key(name)].shape}"
        for name in sorted(found - set(expected) - tied)
    ]
    problems = {
        "of another shape or dtype": other,
        "only in the model": lacking,
        "only in the checkpoint": more,
        "trained in one of them": frozen,
    }
    if any(problems.values()):
        text = "".join(
            f"\n  {len(lines)} {what}:{_listed(lines)}" for what, lines in problems.items() if lines
        )
        raise ValueError(
            f"{stored.path} does not fit the model; nothing is changed.{text}\n{stored.remedy}"
        )
    return names


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "".join(f"\n    {line}" for line in [*lines[:_LISTED], *more])
