"""Reads checkpoints of torch.distributed.checkpoint, with or without a model to load them into.

Their keys say what they have: the layout of torch's get_state_dict().
That is {"model": {NAME: tensor}, "optim": {"state": {NAME: {STATE: tensor}}, "param_groups":
[{"params": [NAME, ...], OPTION: value}]}}, whose keys are the paths joined by dots. Read are also
"optimizer" for "optim", the flattened optimizer state (StateDictOptions.flatten_optimizer_state_
dict), whose options are by parameter, and a model's state dict alone, without anything around it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetero.checkpoint.data_writer import Range
from hetero.checkpoint.dcp.metadata import Box, DcpMetadata, Place, read_metadata, rows_around
from hetero.checkpoint.load import load_from
from hetero.checkpoint.manifest import (
    OptimizerRecord,
    ParamRecord,
    TensorRecord,
    master_key,
    state_key,
)
from hetero.checkpoint.optimizer_guess import optimizer_records
from hetero.checkpoint.save import Optimizers, engine_and_optimizers
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint, make_manifest
from hetero.checkpoint.torch_file import check_memory, load_plain
from offload.errors import CheckpointError
from offload.interrupts import uninterrupted

MODEL, OPTIMIZER = "model", "optim"
STEP = "step"
_OPTIMIZER_NAMES = (OPTIMIZER, "optimizer")


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
    engine, optimizers = engine_and_optimizers(model, optimizer)

    def open_stored() -> DcpCheckpoint:
        return DcpCheckpoint(Path(path), with_optimizer=bool(optimizers))

    load_from(open_stored, engine, optimizers, {}, str(path))


@dataclass(frozen=True)
class DcpKeys:
    """The keys of a checkpoint by what they are.

    Attributes:
        model: parameters and buffers, by name.
        states: by parameter and state; its step, too.
        groups: of each param group the options.
        by_param: options by parameter, where the optimizer's state is flattened.
        others: keys of what is neither.
    """

    model: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: dict[int, dict[str, str]] = field(default_factory=dict)
    by_param: dict[str, dict[str, str]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, metadata: DcpMetadata) -> DcpKeys:
        """That of a checkpoint's keys."""
        made = cls()
        # (Without paths a state dict is flat, whose names may begin with "model.", too.)
        paths = {key: metadata.paths.get(key, ()) for key in (*metadata.tensors, *metadata.objects)}
        tops = {path[0] for path in paths.values() if len(path) > 1}
        is_flat = not tops & {MODEL, *_OPTIMIZER_NAMES}
        for key, path in paths.items():
            top, _, rest = key.partition(".")
            kind, _, what = rest.partition(".")
            name, _, last = what.rpartition(".")
            is_tensor, is_nested = key in metadata.tensors, top in tops
            if is_tensor and (is_flat or (is_nested and top == MODEL)):
                made.model[key if is_flat else rest] = key
            elif not is_nested or top not in _OPTIMIZER_NAMES or not name:
                made.others.append(key)
            elif kind == "state" and is_tensor:
                made.states.setdefault(name, {})[last] = key
            elif kind != "param_groups":
                made.others.append(key)
            elif len(path) > 2 and isinstance(path[2], int) and name.isdecimal():
                made.groups.setdefault(int(name), {})[last] = key
            else:
                made.by_param.setdefault(name, {})[last] = key
        return made

    def option_keys(self) -> list[str]:
        """Those of all options."""
        found = [*self.groups.values(), *self.by_param.values()]
        return [key for options in found for key in options.values()]


def param_groups(dcp_keys: DcpKeys, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The param groups, "params" by name; `values` are those of dcp_keys.option_keys().

    Where options are by parameter, those with the same ones are a group. Raises ValueError.
    """
    if dcp_keys.groups:
        made = []
        for number in sorted(dcp_keys.groups):
            group = {name: _plain(values[key]) for name, key in dcp_keys.groups[number].items()}
            names = group.get("params")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"param group {number} of the checkpoint has no names in params")
            made.append(group)
        return made
    by_options: dict[str, dict[str, Any]] = {}
    for name, keys in dcp_keys.by_param.items():
        options = {option: _plain(values[key]) for option, key in keys.items()}
        group = by_options.setdefault(repr(sorted(options.items())), {**options, "params": []})
        group["params"].append(name)
    return list(by_options.values())


def _plain(value: Any) -> Any:
    """An option; a learning rate may be a tensor."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value


class DcpCheckpoint(StoredCheckpoint):
    """What dcp.save() has written of a model's and its optimizers' state dicts.

    A chunk of it is in memory as a whole, as torch.save() has written it, one at a time.
    """

    kind = "DCP checkpoint (torch.distributed.checkpoint)"
    knows_frozen = False  # (a frozen parameter may be in a param group, or in none)

    def __init__(self, path: Path, with_optimizer: bool = True) -> None:
        """Reads the metadata, and of optimizers the options and the steps.

        Raises CheckpointError, ValueError for options of an update that hetero does not have.
        """
        super().__init__(path)
        self._metadata = read_metadata(path)
        self._dcp_keys = dcp_keys = DcpKeys.of(self._metadata)
        self._tensors = self._metadata.tensors
        self.files = self._check_files()
        self._keys = {master_key(name): key for name, key in dcp_keys.model.items()}
        self._groups = self._param_groups() if with_optimizer else []
        trained = {name for group in self._groups for name in group["params"]}
        records = optimizer_records(self._groups, dcp_keys.states)
        steps = self._steps() if with_optimizer else {}
        tied = self._tied(trained)
        others = {name for names in tied.values() for name in names}
        tensors = {
            name: self._tensors[key] for name, key in dcp_keys.model.items() if name not in others
        }
        states: dict[str, TensorRecord] = {}
        for record in records:
            for name in (name for group in record.groups for name in group.params):
                if name in tensors:
                    states |= self._states(name, record.states, tensors[name])
        floating = [n for n, t in tensors.items() if t.dtype.is_floating_point]
        # (Buffers are in no param group; but then neither are frozen parameters.)
        params = {n: ParamRecord(tied.get(n, ()), n in trained, steps.get(n, 0)) for n in floating}
        self.manifest = make_manifest(tensors, params, records, states)
        if dcp_keys.others:
            self.notes.append(
                f"{len(dcp_keys.others)} entries are of neither a model nor an optimizer: "
                f"{', '.join(dcp_keys.others[:3])}{', ...' if len(dcp_keys.others) > 3 else ''}"
            )

    def _states(
        self, name: str, wanted: Sequence[str], param: TensorRecord
    ) -> dict[str, TensorRecord]:
        """The records of a parameter's states. Raises CheckpointError if some are missing."""
        found = self._dcp_keys.states.get(name, {})
        records = {}
        for state in wanted:
            key = state_key(name, state)
            if state in found:
                self._keys[key] = found[state]
                records[key] = self._tensors[found[state]]
            elif found.keys() & set(wanted):
                raise CheckpointError(
                    f"{self.path} has the states {', '.join(sorted(found))} of {name}, and lacks "
                    f"{state}"
                )
            else:  # of a parameter that was never updated
                records[key] = TensorRecord(param.shape, torch.float32)
        return records

    def _tied(self, trained: set[str]) -> dict[str, tuple[str, ...]]:
        """Names that share their bytes with another name, as save_dcp() writes tied ones."""
        by_place: dict[tuple[str, int], list[str]] = {}
        for name, key in self._dcp_keys.model.items():
            _, place = self._metadata.boxes[key][0]
            by_place.setdefault((place.relative_path, place.offset), []).append(name)
        found = {}
        for names in by_place.values():
            first, *others = sorted(names, key=lambda name: name not in trained)
            if others:
                found[first] = tuple(others)
        return found

    def _steps(self) -> dict[str, int]:
        """Of SGD, which keeps none, a buffer says that there was one. Raises CheckpointError."""
        states = self._dcp_keys.states
        keys = {name: found[STEP] for name, found in states.items() if STEP in found}
        found = {name: self._small(keys[name]) if name in keys else 1 for name in states}
        for name, step in found.items():
            if torch.as_tensor(step, device="cpu").numel() != 1 or not 0 <= float(step) < 2**53:
                raise CheckpointError(f"the step of {name} is {step!r} in {self.path}")
        return {name: int(step) for name, step in found.items()}

    def optimizers_of(self, groups: Sequence[Sequence[Sequence[str]]]) -> Sequence[OptimizerRecord]:
        """See StoredCheckpoint: groups of all optimizers follow one another, or have no order."""
        if not self._groups:
            return ()
        stored: Sequence[Mapping[str, Any]] = self._groups
        wanted = [names for each in groups for names in each]
        if self._dcp_keys.by_param:
            stored = [_group_of(stored, names, number) for number, names in enumerate(wanted)]
        if len(stored) != len(wanted):
            raise ValueError(
                f"{self.path} has {len(stored)} param groups, and the optimizers {len(wanted)}"
            )
        made, first = [], 0
        for each in groups:
            own = stored[first : first + len(each)]
            made += optimizer_records(own, self._dcp_keys.states, in_own_words=False)
            first += len(each)
        return made

    def values(self, order: Iterable[Sequence[Range]]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """See StoredCheckpoint: what is asked for of a chunk is in memory at once."""
        for chunk in order:
            rows = self._rows(chunk)
            for key, begin, end in chunk:
                if key in rows:
                    first, flat = rows[key]
                    yield key, begin, flat[begin - first : end - first]
                else:  # the state of a parameter that was never updated
                    dtype = self.manifest.tensors[key].dtype
                    yield key, begin, torch.zeros(end - begin, dtype=dtype, device="cpu")
            rows.clear()  # before the next ones take memory

    def _rows(self, ranges: Sequence[Range]) -> dict[str, tuple[int, torch.Tensor]]:
        """The rows that have these ranges, by key: the first element, and they, flat."""
        around: dict[str, tuple[int, int]] = {}
        for key, begin, end in ranges:
            first, last = around.get(key, (begin, end))
            around[key] = min(first, begin), max(last, end)
        found: dict[str, tuple[int, torch.Tensor]] = {}
        wanted: dict[str, tuple[Box, torch.Tensor]] = {}
        for key, (begin, end) in around.items():
            if key in self._keys:
                record = self.manifest.tensors[key]
                box, first = rows_around(record.shape, begin, end)
                rows = torch.empty(box.sizes, dtype=record.dtype, device="cpu")
                found[key] = first, rows.view(-1)
                wanted[self._keys[key]] = box, rows
        self._fill(wanted)
        return found

    def _check_files(self) -> dict[str, int]:
        """The sizes of the files. Raises CheckpointError if one is missing or too short."""
        ends: dict[str, int] = {}
        metadata = self._metadata
        of_tensors = (place for boxes in metadata.boxes.values() for _, place in boxes)
        for place in (*of_tensors, *metadata.objects.values()):
            end = place.offset + place.length
            ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
        sizes = {}
        for name, end in ends.items():
            path = self.path / name
            try:
                sizes[name] = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            if sizes[name] < end:
                raise CheckpointError(
                    f"{path} has {sizes[name]} bytes, and the checkpoint needs {end} of it"
                )
        return sizes

    def _fill(self, wanted: Mapping[str, tuple[Box, torch.Tensor]]) -> None:
        """Fills tensors, by key: each gets a box of the stored tensor, in its own dtype.

        Raises CheckpointError.
        """
        for key, (box, tensor) in wanted.items():
            for stored, place in self._metadata.boxes[key] if box.numel else ():
                common = box.common_with(stored)
                if common is not None:
                    value = self._value(key, place)
                    if not isinstance(value, torch.Tensor) or tuple(value.shape) != stored.sizes:
                        raise CheckpointError(
                            f"{self.path} is damaged in {key}: at {stored.offsets} is no tensor "
                            f"of shape {stored.sizes}"
                        )
                    check_memory(value, f"{key!r} of {self.path}")
                    common.cut(tensor, box).copy_(common.cut(value, stored))

    def _small(self, key: str) -> Any:
        """A small tensor as a whole, or plain data. Raises CheckpointError."""
        if key not in self._tensors:
            return self._value(key, self._metadata.objects[key])
        stored = self._tensors[key]
        found = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self._fill({key: (Box((0,) * found.ndim, stored.shape), found)})
        return found

    def _param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups, "params" by name. Raises CheckpointError."""
        values = {key: self._small(key) for key in self._dcp_keys.option_keys()}
        try:
            return param_groups(self._dcp_keys, values)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def _value(self, key: str, place: Place) -> Any:
        """What torch.save() was given: tensors and plain data. Raises CheckpointError."""
        path = self.path / place.relative_path
        try:
            with path.open("rb") as stream:
                stream.seek(place.offset)
                content = io.BytesIO(stream.read(place.length))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        return load_plain(content, f"{key!r} of {path}")


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
