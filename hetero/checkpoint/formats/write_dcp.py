"""Writes a DCP checkpoint from one of another format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hetero.checkpoint.dcp.boxes import Box, boxes_of
from hetero.checkpoint.dcp.layout import MODEL, OPTIMIZER, STEP
from hetero.checkpoint.dcp.options import torch_options
from hetero.checkpoint.dcp.write import DcpWrite, Item, KeyPath, Part
from hetero.checkpoint.formats.stored_checkpoint import PART_NUMEL, StoredCheckpoint
from hetero.checkpoint.manifest import OptimizerRecord
from hetero.checkpoint.model_tensors import master_key, state_key
from hetero.checkpoint.plain_data import unpack
from offload.errors import CheckpointError


def write_dcp(stored: StoredCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes DCP's files into `folder`; `dtype` is that of parameters, states are fp32."""
    final = folder.with_name(folder.name.removeprefix(".").removesuffix(".incomplete"))
    part = _Contents(stored, dtype).part()
    write = DcpWrite(folder, final, part, 0)
    write.finish([write.write([write.plan()])])


class _Contents:
    """The tensors by their paths in the state dict, in order, and where their values come from."""

    def __init__(self, stored: StoredCheckpoint, dtype: torch.dtype | None) -> None:
        self._stored, self._dtype = stored, dtype
        self._small: list[tuple[Item, torch.Tensor]] = []
        self._tensors: list[tuple[str, list[Item]]] = []
        self._objects: dict[KeyPath, Any] = {}

    def part(self) -> Part:
        """Raises ValueError for options that torch has not."""
        manifest = self._stored.manifest
        for name in (*manifest.params, *manifest.buffers):
            own = self._dtype if name in manifest.params else None
            self._add((MODEL, name), master_key(name), own)
        number = 0
        for optimizer in manifest.optimizers:
            for group in optimizer.groups:
                self._add_states(optimizer, group.params)
                where = f"param group {number}"
                options = self._options(group.options, where)
                for option, value in {**options, "params": list(group.params)}.items():
                    self._objects[OPTIMIZER, "param_groups", number, option] = value
                number += 1
        items = [item for item, _ in self._small]
        items += [item for _, found in self._tensors for item in found]
        same: dict[str, list[KeyPath]] = {
            f"{MODEL}.{name}": [(MODEL, other) for other in param.aliases]
            for name, param in manifest.params.items()
            if param.aliases
        }
        return Part(items, self._values(), self._objects, same)

    def _add(self, path: KeyPath, key: str, dtype: torch.dtype | None) -> None:
        record = self._stored.manifest.tensors[key]
        wanted, shape = dtype or record.dtype, record.shape
        if not record.numel:
            box = Box((0,) * len(shape), shape)
            self._small.append((Item(path, shape, wanted, box), torch.empty(shape, dtype=wanted)))
            return
        items = []
        for begin in range(0, record.numel, PART_NUMEL):
            for box in boxes_of(shape, begin, min(begin + PART_NUMEL, record.numel)):
                items.append(Item(path, shape, wanted, box))
        self._tensors.append((key, items))

    def _add_states(self, optimizer: OptimizerRecord, names: tuple[str, ...]) -> None:
        params = self._stored.manifest.params
        for name in names:
            if name not in params or not params[name].trained:
                continue
            path = (OPTIMIZER, "state", name)
            step = torch.tensor(float(params[name].step))
            self._small.append((Item((*path, STEP), (), step.dtype, Box((), ())), step))
            for state in optimizer.states:
                self._add((*path, state), state_key(name, state), torch.float32)

    def _options(self, packed: Any, where: str) -> dict[str, Any]:
        def tensor(number: int) -> torch.Tensor:
            key = f"data/0/{number}"
            record = self._stored.manifest.tensors.get(key)
            if record is None:
                raise CheckpointError(f"the checkpoint has no tensor {key!r}")
            return self._stored.read(key, 0, record.numel).view(record.shape)

        options = unpack(packed, where, tensor)
        if not isinstance(options, dict):
            raise CheckpointError(f"{where} of the checkpoint is {options!r}")
        return torch_options(options, where)

    def _values(self) -> Iterator[torch.Tensor]:
        yield from (value for _, value in self._small)
        for key, items in self._tensors:
            boxes = iter(items)
            for values in self._stored.parts(key):
                done = 0
                while done < values.numel():
                    item = next(boxes)
                    flat = values[done : done + item.box.numel]
                    yield flat.to(item.dtype).view(item.box.sizes)
                    done += item.box.numel
