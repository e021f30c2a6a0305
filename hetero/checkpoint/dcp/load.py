"""Loading what torch.distributed.checkpoint has saved, of FSDP2, of plain torch or of hetero."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.api.whole_state import Piece, fill_parts
from hetero.checkpoint.dcp.boxes import Box, rows_around
from hetero.checkpoint.dcp.layout import STEP
from hetero.checkpoint.dcp.reader import DcpReader
from hetero.checkpoint.model_tensors import STATE_NAMES, ModelTensors
from hetero.checkpoint.save import Optimizers, check_optimizers, engine_of_model, listed
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from offload.errors import CheckpointError
from offload.interrupts import uninterrupted

_LISTED = 5  # of what does not fit, in an error


@uninterrupted
@torch.no_grad()
def load_dcp(
    path: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizers = None
) -> None:
    """Loads a checkpoint of torch.distributed.checkpoint (DCP) into a managed model.

    It may be of FSDP2, of plain torch, or of save_dcp(), with any number of ranks: the state dicts
    of torch's get_state_dict(model, optimizer) as "model" and "optim" (or "optimizer"), or a
    model's state dict alone. All ranks must call it. Each reads what its shards need, of one chunk
    at a time: beside the budgets that takes up to 12 bytes per element of a chunk, and one chunk
    of the checkpoint's.

    Values become the masters, and parameters their rounding. Options of torch's param groups are
    taken over; what torch has not (bias_correction) stays.

    Its .metadata is a pickle, which torch would run. Here it may name what DCP writes and nothing
    else; options are read as torch.load(weights_only=True) does.

    Args:
        path: the checkpoint's folder.
        model: after hetero.initialize(), with the same parameters.
        optimizer: as hetero.initialize() returned it, or the list. Default: the optimizer's states
            stay, masters excepted.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it names something that DCP
            does not write. If that came late, the model is half loaded, and refuses to be used
            until another checkpoint is loaded.
        ValueError: it is of another model or optimizer. Nothing is changed.
        HeteroError: another rank met one of these.
    """
    engine = engine_of_model(model)
    with engine.params.loading():
        engine.check_usable()
        optimizers = listed(optimizer)
        check_optimizers(engine, optimizers)
        failure: Exception | None = None
        try:
            loading = _Loading(Path(path), engine, optimizers)
        except Exception as error:
            failure = error
        engine.world.all_or_none(failure, f"load {path}", (CheckpointError,))
        loading.load()


class _Loading:
    """A checkpoint that fits the model."""

    def __init__(self, path: Path, engine: Engine, optimizers: Sequence[HybridOptimizer]) -> None:
        """Reads what is small, and compares. Raises as load_dcp(), with nothing changed."""
        self._engine, self._optimizers, self._path = engine, optimizers, path
        self._reader = DcpReader(path)
        engine.added_params.take_in_unfrozen()
        self._model = ModelTensors.of(engine)
        self._keys = self._model_keys()
        self._names = {m: name for name, m in self._model.params.items()}
        self._steps: dict[str, int] = {}
        self._groups: list[list[dict[str, Any]]] = []
        if optimizers:
            self._groups = self._check_groups()
            self._steps = self._check_states()
        self._plain = {name: self._reader.whole(self._keys[name]) for name in self._model.plain}
        self._read: dict[ManagedParam, tuple[int, list[torch.Tensor]]] = {}

    def _model_keys(self) -> dict[str, str]:
        """The keys of the model's tensors, by their first names. Raises ValueError."""
        found, keys, wrong = self._reader.layout.model, {}, []
        expected = {name: m.param for name, m in self._model.params.items()} | self._model.plain
        known = set(expected)
        for name, tensor in expected.items():
            others = self._model.aliases.get(name, ())
            known |= set(others)
            stored = next((each for each in (name, *others) if each in found), None)
            if stored is None:
                wrong.append(f"it lacks {name}, of shape {tuple(tensor.shape)}")
                continue
            keys[name] = found[stored]
            record = self._reader.tensors[keys[name]]
            if record.shape != tuple(tensor.shape):
                wrong.append(
                    f"{name} has the shape {record.shape}, and in the model {tuple(tensor.shape)}"
                )
            elif tensor.dtype.is_floating_point != record.dtype.is_floating_point:
                wrong.append(f"{name} has {record.dtype}, and in the model {tensor.dtype}")
        wrong += [
            f"it has {name}, which the model does not have" for name in sorted(set(found) - known)
        ]
        if wrong:
            more = f"; and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
            raise ValueError(
                f"{self._path} is of another model: {'; '.join(wrong[:_LISTED])}{more}; build the "
                f"model as it was saved"
            )
        return keys

    def _check_groups(self) -> list[list[dict[str, Any]]]:
        """The options of each optimizer's param groups. Raises ValueError."""
        if not self._reader.layout.has_optimizer:
            raise ValueError(
                f"{self._path} has no optimizer's state; without `optimizer` the parameters alone "
                f"are loaded"
            )
        groups = self._reader.param_groups()
        own = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if self._reader.layout.by_param:
            groups = [_group_of(groups, self._group_names(group), i) for i, group in enumerate(own)]
        if len(groups) != len(own):
            raise ValueError(
                f"{self._path} has {len(groups)} param groups, and the optimizers {len(own)}"
            )
        for index, (group, mine) in enumerate(zip(groups, own, strict=True)):
            names = self._group_names(mine)
            if set(names) != set(group["params"]):
                differing = sorted(set(names) ^ set(group["params"]))
                raise ValueError(
                    f"param group {index} of {self._path} has other parameters than the "
                    f"optimizer's: {', '.join(differing[:_LISTED])}; make the param groups as they "
                    f"were"
                )
            group["params"] = mine["params"]
        made, first = [], 0
        for optimizer in self._optimizers:
            last = first + len(optimizer.param_groups)
            made.append(optimizer.options_of(groups[first:last]))
            first = last
        return made

    def _group_names(self, group: Mapping[str, Any]) -> list[str]:
        return [self._model.names[id(p)] for p in group["params"] if id(p) in self._model.names]

    def _check_states(self) -> dict[str, int]:
        """The numbers of updates, by name. Raises ValueError."""
        states, keys = self._reader.layout.states, {}
        for m, name in self._names.items():
            if not m.chunk.trainable or name not in states:
                continue  # (torch has no state of a parameter that was never updated)
            for state in self._rule_states(m):
                key = states[name].get(state)
                if key is None:
                    raise ValueError(
                        f"{self._path} has the states {', '.join(sorted(states[name]))} of {name}, "
                        f"and the optimizer needs {state}"
                    )
                record = self._reader.tensors[key]
                if record.shape != tuple(m.param.shape) or not record.dtype.is_floating_point:
                    raise ValueError(
                        f"{state} of {name} has the shape {record.shape} and {record.dtype}"
                    )
            keys[name] = states[name].get(STEP)
        values = self._reader.objects([key for key in keys.values() if key is not None])
        # (SGD and Muon keep no step, and a buffer from the first update on.)
        found = {name: 1 if key is None else values[key] for name, key in keys.items()}
        for name, step in found.items():
            if torch.as_tensor(step).numel() != 1 or not 0 <= float(step) < 2**53:
                raise ValueError(f"the step of {name} is {step!r} in {self._path}")
        return {name: int(step) for name, step in found.items()}

    def _rule_states(self, m: ManagedParam) -> Sequence[str]:
        return STATE_NAMES[self._engine.params.group(m.chunk).dtypes.rule]

    def load(self) -> None:
        """Changes the model and the optimizers."""
        engine = self._engine
        engine.params.begin_loading(str(self._path))
        with engine.world.telling_failures("hetero.load_dcp()"):
            self._load_params()
            for name, tensor in self._model.plain.items():
                tensor.copy_(self._plain[name])
        if self._optimizers:
            for m, name in self._names.items():
                if m.chunk.trainable:
                    m.step = self._steps.get(name, 0)
            for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
                for group, options in zip(optimizer.param_groups, groups, strict=True):
                    group.update({k: v for k, v in options.items() if k != "params"})
        engine.params.end_loading()

    def _load_params(self) -> None:
        replaces = bool(self._optimizers)
        failure = fill_parts(self._engine, self._names, self._fill, replaces)
        self._read = {}
        self._engine.world.all_or_none(failure, f"load {self._path}", (CheckpointError,))

    def _fill(self, piece: Piece) -> None:
        """A piece of a parameter gets what the checkpoint has. Raises CheckpointError."""
        if piece.managed not in self._read:
            self._read = {}  # before the next chunk's takes memory
            self._read = self._read_chunk(piece.managed)
        first, (master, *states) = self._read[piece.managed]
        part = slice(piece.part.in_param.start - first, piece.part.in_param.stop - first)
        if states:
            piece.set_states([state[part] for state in states])
        piece.set_master(master[part].to(piece.values.device))

    def _read_chunk(
        self, managed: ManagedParam
    ) -> dict[ManagedParam, tuple[int, list[torch.Tensor]]]:
        """Of each parameter of a chunk the rows that have this rank's elements, in fp32, flat:
        master and states, and which element is their first."""
        layout = self._engine.params.group(managed.chunk).layout
        found: dict[ManagedParam, tuple[int, list[torch.Tensor]]] = {}
        wanted: dict[str, tuple[Box, torch.Tensor]] = {}
        for m, name in self._names.items():
            if m.chunk is not managed.chunk:
                continue
            _, own = m.in_shard(layout)
            if own.stop <= own.start:
                continue
            box, first = rows_around(m.param.shape, own.start, own.stop)
            with_states = bool(self._optimizers) and m.chunk.trainable
            stored = self._reader.layout.states.get(name, {}) if with_states else {}
            keys = [self._keys[name]]
            keys += [stored.get(state, "") for state in self._rule_states(m) if with_states]
            tensors = []
            for key in keys:
                tensor = torch.empty(box.sizes) if key else torch.zeros(box.sizes)
                tensors.append(tensor.view(-1))
                if key:
                    wanted[key] = (box, tensor)
            found[m] = (first, tensors)
        self._reader.fill(wanted)
        return found


def _group_of(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str], index: int
) -> dict[str, Any]:
    """The options that all of `names` have, which were kept by parameter. Raises ValueError."""
    fitting = [group for group in groups if set(names) & set(group["params"])]
    if len(fitting) != 1 or not set(names) <= set(fitting[0]["params"]):
        raise ValueError(
            f"the checkpoint has options by parameter, and param group {index} has parameters with "
            f"different ones, or without; make the param groups as they were"
        )
    return {**fitting[0], "params": list(names)}
