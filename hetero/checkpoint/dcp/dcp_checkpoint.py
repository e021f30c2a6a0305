"""Reads checkpoints of torch.distributed.checkpoint, with or without a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from hetero.checkpoint.dcp.boxes import Box, rows_around
from hetero.checkpoint.dcp.layout import STEP
from hetero.checkpoint.dcp.reader import DcpReader
from hetero.checkpoint.manifest import OptimizerRecord, ParamRecord, TensorRecord
from hetero.checkpoint.model_tensors import master_key, state_key
from hetero.checkpoint.optimizer_guess import optimizer_records
from hetero.checkpoint.stored_checkpoint import Range, StoredCheckpoint, make_manifest
from offload.errors import CheckpointError


class DcpCheckpoint(StoredCheckpoint):
    """What dcp.save() has written of a model's and its optimizers' state dicts."""

    kind = "DCP checkpoint (torch.distributed.checkpoint)"
    knows_frozen = False  # (a frozen parameter may be in a param group, or in none)

    def __init__(self, path: Path, with_optimizer: bool = True) -> None:
        """Reads the metadata, and of optimizers the options and the steps.

        Raises CheckpointError, ValueError for options of an update that hetero does not have.
        """
        super().__init__(path)
        self._reader = reader = DcpReader(path)
        layout = reader.layout
        self.files = reader.files
        self._keys = {master_key(name): key for name, key in layout.model.items()}
        self._groups = reader.param_groups() if with_optimizer else []
        trained = {name for group in self._groups for name in group["params"]}
        records = optimizer_records(self._groups, layout.states)
        steps = self._steps() if with_optimizer else {}
        tied = self._tied(trained)
        others = {name for names in tied.values() for name in names}
        tensors = {
            name: reader.tensors[key] for name, key in layout.model.items() if name not in others
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
        if layout.others:
            self.notes.append(
                f"{len(layout.others)} entries are of neither a model nor an optimizer: "
                f"{', '.join(layout.others[:3])}{', ...' if len(layout.others) > 3 else ''}"
            )
        self._order: Iterator[Sequence[Range]] = iter(())
        # What is in memory, by key: the first element, and the rows that begin with it, flat.
        self._held: dict[str, tuple[int, torch.Tensor]] = {}

    def _states(
        self, name: str, wanted: Sequence[str], param: TensorRecord
    ) -> dict[str, TensorRecord]:
        """The records of a parameter's states. Raises CheckpointError if some are missing."""
        found = self._reader.layout.states.get(name, {})
        records = {}
        for state in wanted:
            key = state_key(name, state)
            if state in found:
                self._keys[key] = found[state]
                records[key] = self._reader.tensors[found[state]]
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
        metadata = self._reader.metadata
        by_place: dict[tuple[str, int], list[str]] = {}
        for name, key in self._reader.layout.model.items():
            entry = metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            place = metadata.storage_data[MetadataIndex(key, entry.chunks[0].offsets)]
            by_place.setdefault((place.relative_path, place.offset), []).append(name)
        found = {}
        for names in by_place.values():
            first, *others = sorted(names, key=lambda name: name not in trained)
            if others:
                found[first] = tuple(others)
        return found

    def _steps(self) -> dict[str, int]:
        """Of SGD, which keeps none, a buffer says that there was one. Raises CheckpointError."""
        states = self._reader.layout.states
        keys = {name: found[STEP] for name, found in states.items() if STEP in found}
        values = self._reader.objects(keys.values())
        found = {name: values[keys[name]] if name in keys else 1 for name in states}
        for name, step in found.items():
            if torch.as_tensor(step).numel() != 1 or not 0 <= float(step) < 2**53:
                raise CheckpointError(f"the step of {name} is {step!r} in {self.path}")
        return {name: int(step) for name, step in found.items()}

    def optimizers_of(self, groups: Sequence[Sequence[Sequence[str]]]) -> Sequence[OptimizerRecord]:
        """See StoredCheckpoint: groups of all optimizers follow one another, or have no order."""
        if not self._groups:
            return ()
        stored: Sequence[Mapping[str, Any]] = self._groups
        wanted = [names for each in groups for names in each]
        if self._reader.layout.by_param:
            stored = [_group_of(stored, names, number) for number, names in enumerate(wanted)]
        if len(stored) != len(wanted):
            raise ValueError(
                f"{self.path} has {len(stored)} param groups, and the optimizers {len(wanted)}"
            )
        made, first = [], 0
        for each in groups:
            own = stored[first : first + len(each)]
            made += optimizer_records(own, self._reader.layout.states, in_own_words=False)
            first += len(each)
        return made

    def expect(self, order: Iterable[Sequence[Range]]) -> None:
        """See StoredCheckpoint; of a chunk everything is in memory at once."""
        self._order = iter(order)

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """See StoredCheckpoint; without expect() the whole tensor is in memory."""
        if key not in self._keys:
            return torch.zeros(end - begin, dtype=self.manifest.tensors[key].dtype)
        if not self._holds(key, begin, end):
            self._held = {}  # before the next one takes memory
            self._hold(next(self._order, ()))
        if not self._holds(key, begin, end):
            self._hold([(key, 0, self.manifest.tensors[key].numel)])
        first, rows = self._held[key]
        return rows[begin - first : end - first]

    def _holds(self, key: str, begin: int, end: int) -> bool:
        first, rows = self._held.get(key, (math.inf, torch.empty(0)))
        return first <= begin and end <= first + len(rows)

    def _hold(self, ranges: Sequence[Range]) -> None:
        """Reads the rows that have these ranges."""
        around: dict[str, tuple[int, int]] = {}
        for key, begin, end in ranges:
            first, last = around.get(key, (begin, end))
            around[key] = min(first, begin), max(last, end)
        wanted: dict[str, tuple[Box, torch.Tensor]] = {}
        for key, (begin, end) in around.items():
            if key in self._keys:
                record = self.manifest.tensors[key]
                box, first = rows_around(record.shape, begin, end)
                rows = torch.empty(box.sizes, dtype=record.dtype)
                self._held[key] = first, rows.view(-1)
                wanted[self._keys[key]] = box, rows
        self._reader.fill(wanted)

    def close(self) -> None:
        """See StoredCheckpoint."""
        self._held = {}


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
