"""What a process writes of a checkpoint as DCP: of another format, or of a model in training.

A flat range of a tensor is at most 2n - 1 boxes of n dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hetero.checkpoint.dcp.boxes import Box, boxes_of
from hetero.checkpoint.dcp.layout import MODEL, OPTIMIZER, STEP
from hetero.checkpoint.dcp.options import torch_options
from hetero.checkpoint.dcp.write import Item, KeyPath, Part
from hetero.checkpoint.model_tensors import master_key, state_key
from hetero.checkpoint.plain_data import unpack
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from offload.errors import CheckpointError


def dcp_part(stored: StoredCheckpoint, dtype: torch.dtype | None, first: bool = True) -> Part:
    """What this process writes of a checkpoint.

    Args:
        stored: the checkpoint.
        dtype: of parameters; None: as they are stored.
        first: this is the first rank, which writes what is small.

    Raises ValueError for options that torch does not have.
    """
    manifest = stored.manifest
    # By key: the path in the state dict, and the dtype.
    written: dict[str, tuple[KeyPath, torch.dtype]] = {}
    small: list[tuple[Item, torch.Tensor]] = []
    objects: dict[KeyPath, Any] = {}
    for name in (*manifest.params, *manifest.buffers):
        key = master_key(name)
        own = dtype if name in manifest.params else None
        written[key] = (MODEL, name), own or manifest.tensors[key].dtype
    groups = [(optimizer, group) for optimizer in manifest.optimizers for group in optimizer.groups]
    for number, (optimizer, group) in enumerate(groups):
        for name in group.params:
            if name in manifest.params and manifest.params[name].trained:
                path: KeyPath = (OPTIMIZER, "state", name)
                step = torch.tensor(float(manifest.params[name].step))
                small.append((Item((*path, STEP), (), step.dtype, Box((), ())), step))
                for state in optimizer.states:
                    written[state_key(name, state)] = (*path, state), torch.float32
        if first:
            options = _options(stored, group.options, f"param group {number}")
            for option, value in {**options, "params": list(group.params)}.items():
                objects[OPTIMIZER, "param_groups", number, option] = value
    for key, (path, own) in written.items():
        shape = manifest.tensors[key].shape
        if not manifest.tensors[key].numel:
            box = Box((0,) * len(shape), shape)
            small.append((Item(path, shape, own, box), torch.empty(shape, dtype=own)))
    if not first:
        small = []
    items = [item for item, _ in small]
    for key, begin, end in stored.ranges():
        if key in written and end > begin:
            path, own = written[key]
            shape = manifest.tensors[key].shape
            items += [Item(path, shape, own, box) for box in boxes_of(shape, begin, end)]

    def values() -> Iterator[torch.Tensor]:
        yield from (value for _, value in small)
        boxes = iter(items[len(small) :])
        for (key, begin, end), flat in zip(stored.ranges(), stored.values(), strict=True):
            done = 0 if key in written else end - begin
            while done < end - begin:
                item = next(boxes)
                value = flat[done : done + item.box.numel]
                yield value.to(device="cpu", dtype=item.dtype).view(item.box.sizes)
                done += item.box.numel

    same: dict[str, list[KeyPath]] = {
        f"{MODEL}.{name}": [(MODEL, other) for other in param.aliases]
        for name, param in manifest.params.items()
        if param.aliases
    }
    return Part(items, values(), objects, same)


def _options(stored: StoredCheckpoint, packed: Any, where: str) -> dict[str, Any]:
    options = unpack(packed, where, lambda number: stored.own_tensor(0, number))
    if not isinstance(options, dict):
        raise CheckpointError(f"{where} of the checkpoint is {options!r}")
    return torch_options(options, where)
