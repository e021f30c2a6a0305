"""Reads checkpoints of torch.distributed.checkpoint, for whoever has no model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from hetero.checkpoint.dcp.layout import STEP
from hetero.checkpoint.dcp.reader import DcpReader
from hetero.checkpoint.formats.optimizer_guess import optimizer_records
from hetero.checkpoint.formats.stored_checkpoint import StoredCheckpoint, make_manifest
from hetero.checkpoint.manifest import ParamRecord, TensorRecord
from hetero.checkpoint.model_tensors import master_key, state_key


class DcpCheckpoint(StoredCheckpoint):
    """What dcp.save() has written of a model's and its optimizers' state dicts."""

    kind = "DCP checkpoint (torch.distributed.checkpoint)"

    def __init__(self, path: Path) -> None:
        """Reads the metadata, the options and the steps. Raises CheckpointError."""
        super().__init__(path)
        self._reader = reader = DcpReader(path)
        layout = reader.layout
        self.files = reader.files
        self._keys = {master_key(name): key for name, key in layout.model.items()}
        groups = reader.param_groups()
        trained = {name for group in groups for name in group["params"]}
        records = optimizer_records(groups, layout.states)
        names = {
            name: record.states for record in records for g in record.groups for name in g.params
        }
        steps = self._steps()
        tied = self._tied(trained)
        others = {name for names in tied.values() for name in names}
        tensors = {
            name: self._record(key) for name, key in layout.model.items() if name not in others
        }
        states: dict[str, TensorRecord] = {}
        for name in trained & set(tensors):
            for state in names[name]:
                if state in layout.states.get(name, {}):
                    self._keys[state_key(name, state)] = layout.states[name][state]
                    states[state_key(name, state)] = self._record(layout.states[name][state])
                else:  # of a parameter that was never updated
                    states[state_key(name, state)] = TensorRecord(
                        tensors[name].shape, torch.float32
                    )
        floating = [n for n, t in tensors.items() if t.dtype.is_floating_point]
        # (Buffers are in no param group; but then neither are frozen parameters.)
        params = {n: ParamRecord(tied.get(n, ()), n in trained, steps.get(n, 0)) for n in floating}
        self.manifest = make_manifest(tensors, params, records, states)
        if layout.others:
            self.notes.append(
                f"{len(layout.others)} entries are of neither a model nor an optimizer: "
                f"{', '.join(layout.others[:3])}{', ...' if len(layout.others) > 3 else ''}"
            )
        self._last: tuple[str, torch.Tensor] | None = None

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

    def _record(self, key: str) -> TensorRecord:
        stored = self._reader.tensors[key]
        return TensorRecord(stored.shape, stored.dtype)

    def _steps(self) -> dict[str, int]:
        """Of SGD, which keeps none, a buffer says that there was one."""
        states = self._reader.layout.states
        keys = {name: found[STEP] for name, found in states.items() if STEP in found}
        values = self._reader.objects(keys.values())
        return {name: int(values[keys[name]]) if name in keys else 1 for name in states}

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """See StoredCheckpoint; a whole tensor is in memory."""
        if key not in self._keys:
            return torch.zeros(end - begin, dtype=self.manifest.tensors[key].dtype)
        if self._last is None or self._last[0] != key:
            self._last = None  # before the next one takes memory
            self._last = (key, self._reader.whole(self._keys[key]).reshape(-1))
        return self._last[1][begin:end].clone()

    def close(self) -> None:
        """See StoredCheckpoint."""
        self._last = None
