"""Writes a checkpoint as DCP by torch's FileSystemWriter, a piece at a time, as they are asked for.

It is one of another format, or a model in training. A flat range of a tensor is at most 2n - 1
boxes of n dimensions.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from hetero.checkpoint.dcp.boxes import Box, boxes_of
from hetero.checkpoint.dcp.layout import MODEL, OPTIMIZER, STEP
from hetero.checkpoint.manifest import master_key, state_key
from hetero.checkpoint.plain_data import pack, unpack
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from offload.errors import CheckpointError, HeteroError, StoreError

_BUFFERS = 8  # of different sizes, for values that are being written
_OWN = ("bias_correction", "adamw_mode")  # options that torch's optimizers lack

KeyPath = tuple[str | int, ...]  # of a key in the nested state dict


class _Planner(DefaultSavePlanner):
    """torch's planner, whose local plan is this process's part of a checkpoint.

    Values are read as they are written, in the order of the plan.
    """

    def __init__(self, stored: StoredCheckpoint, dtype: torch.dtype | None, first: bool) -> None:
        """See DcpWrite."""
        super().__init__()
        self._stored = stored
        manifest = stored.manifest
        self._paths: dict[str, KeyPath] = {}  # by DCP's key, that in the nested state dict
        self._objects: dict[str, Any] = {}
        self._small: list[torch.Tensor] = []
        self._items: list[WriteItem] = []  # of the small tensors, then of ranges()
        # By hetero's key: the path in the state dict, and the dtype.
        self._written: dict[str, tuple[KeyPath, torch.dtype]] = {}
        for name in (*manifest.params, *manifest.buffers):
            own = dtype if name in manifest.params else None
            wanted = own or manifest.tensors[master_key(name)].dtype
            self._written[master_key(name)] = (MODEL, name), wanted
        groups = [(each, group) for each in manifest.optimizers for group in each.groups]
        for number, (optimizer, group) in enumerate(groups):
            for name in group.params:
                if name in manifest.params and manifest.params[name].trained:
                    path: KeyPath = (OPTIMIZER, "state", name)
                    if first:
                        step = torch.tensor(float(manifest.params[name].step))
                        self._add_small((*path, STEP), step)
                    for state in optimizer.states:
                        self._written[state_key(name, state)] = (*path, state), torch.float32
            if first:
                options = _torch_options(stored, group.options, f"param group {number}")
                for option, value in {**options, "params": list(group.params)}.items():
                    self._objects[self._key((OPTIMIZER, "param_groups", number, option))] = value
        for key, (path, own) in self._written.items():
            if first and not manifest.tensors[key].numel:
                self._add_small(path, torch.empty(manifest.tensors[key].shape, dtype=own))
        for key, begin, end in stored.ranges():
            if key in self._written and end > begin:
                path, own = self._written[key]
                shape = manifest.tensors[key].shape
                self._items += [
                    _write_item(self._key(path), shape, own, box)
                    for box in boxes_of(shape, begin, end)
                ]
        # Keys that have the values of another key, by that one: tied parameters.
        self.same: dict[str, list[str]] = {
            self._key((MODEL, name)): [self._key((MODEL, other)) for other in param.aliases]
            for name, param in manifest.params.items()
        }
        self._values = zip(self._items, self._all_values(), strict=True)
        # By bytes, the last used at the end.
        self._buffers: OrderedDict[int, torch.Tensor] = OrderedDict()

    def _key(self, path: KeyPath) -> str:
        """The path as DCP flattens state dicts."""
        key = ".".join(map(str, path))
        self._paths[key] = path
        return key

    def _add_small(self, path: KeyPath, value: torch.Tensor) -> None:
        shape = tuple(value.shape)
        self._items.append(
            _write_item(self._key(path), shape, value.dtype, Box((0,) * len(shape), shape))
        )
        self._small.append(value)

    def _all_values(self) -> Iterator[torch.Tensor]:
        """The values of the items; each is copied before the next one is asked for."""
        yield from self._small
        for (key, begin, end), flat in zip(
            self._stored.ranges(), self._stored.values(), strict=True
        ):
            if key in self._written and end > begin:
                own, done = self._written[key][1], 0
                for box in boxes_of(self._stored.manifest.tensors[key].shape, begin, end):
                    value = flat[done : done + box.numel]
                    yield value.to(device="cpu", dtype=own).view(box.sizes)
                    done += box.numel

    def create_local_plan(self) -> SavePlan:
        """See DefaultSavePlanner."""
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        self.plan = SavePlan([*objects, *self._items], planner_data=self._paths)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See DefaultSavePlanner."""
        plans, metadata = super().create_global_plan(all_plans)
        for key, others in self.same.items():
            for other in others:
                metadata.state_dict_metadata[other] = metadata.state_dict_metadata[key]
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """See DefaultSavePlanner."""
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self._objects[write_item.index.fqn], stream)
            return stream
        item, value = next(self._values)
        if item.index != write_item.index:
            raise CheckpointError(
                f"this torch writes {write_item.index.fqn} before {item.index.fqn}, out of order"
            )
        return self._in_buffer(value)

    def _in_buffer(self, value: torch.Tensor) -> torch.Tensor:
        """A copy in memory that is used again, once it was written.

        torch's writer keeps the last tensor of each key until it has written all, and asks for one
        whose memory has no more than it.
        """
        nbytes = value.numel() * value.itemsize
        if nbytes not in self._buffers:
            if len(self._buffers) == _BUFFERS:
                _, oldest = self._buffers.popitem(last=False)
                oldest.untyped_storage().resize_(0)
            self._buffers[nbytes] = torch.empty(nbytes, dtype=torch.uint8)
        self._buffers.move_to_end(nbytes)
        buffer = self._buffers[nbytes]
        return buffer.view(value.dtype).view(value.shape).copy_(value)


def _write_item(key: str, shape: tuple[int, ...], dtype: torch.dtype, box: Box) -> WriteItem:
    offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
    chunk = ChunkStorageMetadata(offsets, sizes)
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)


def _torch_options(stored: StoredCheckpoint, packed: Any, where: str) -> dict[str, Any]:
    """The options of a param group as torch's optimizer of the same rule has them.

    What torch alone has (amsgrad, foreach, ...) has torch's defaults, so that its load finds all
    that it looks for. Lion, which torch has not, keeps hetero's options.

    Raises ValueError if torch has no such update, or an option is no plain data.
    """
    options = unpack(packed, where, lambda number: stored.own_tensor(0, number))
    if not isinstance(options, dict):
        raise CheckpointError(f"{where} of the checkpoint is {options!r}")
    pack(dict(options), where, [])
    torch_class = _torch_class(options)
    if torch_class is None:
        return dict(options)
    if not options.get("bias_correction", True):
        raise ValueError(
            f"{where} has bias_correction=False, which torch's {torch_class.__name__} lacks; "
            f"keep such an optimizer by hetero.save()"
        )
    defaults: dict[str, Any] = torch_class([torch.zeros(1, 1)]).defaults
    return {**defaults, **{name: value for name, value in options.items() if name not in _OWN}}


def _torch_class(options: Mapping[str, Any]) -> Any:
    """torch's optimizer of the rule that has these options; None for Lion."""
    if "adamw_mode" in options:
        return torch.optim.AdamW if options["adamw_mode"] else torch.optim.Adam
    own_options = {"lr_decay": "Adagrad", "dampening": "SGD", "ns_steps": "Muon"}
    names = [name for option, name in own_options.items() if option in options]
    return getattr(torch.optim, names[0], None) if names else None


class _Writer(FileSystemWriter):
    """torch's; its metadata name the folder that the checkpoint is going to have."""

    def __init__(self, folder: Path, final: Path) -> None:
        # One thread without copies ahead asks for values in the order of the plan.
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0)
        self._final = final

    def storage_meta(self) -> StorageMeta:
        """See FileSystemWriter."""
        return StorageMeta(str(self._final), self.save_id)


class DcpWrite:
    """One rank's steps of DCP's protocol, in the order in which they are called.

    Ranks exchange plans and results as bytes between plan(), write() and finish(); these are
    pickles, as DCP's own messages are, and come from no file.
    """

    def __init__(
        self,
        folder: Path,
        final: Path,
        stored: StoredCheckpoint,
        dtype: torch.dtype | None,
        rank: int = 0,
    ) -> None:
        """Nothing is written yet.

        Args:
            folder: where the files are made.
            final: where the folder is going to be.
            stored: the checkpoint, or this rank's part of a model in training.
            dtype: of parameters; None: as they are stored. States are fp32.
            rank: this rank's number; the first one writes what is small.

        Raises:
            ValueError: torch's optimizers do not have an option.
        """
        self._rank, self._path = rank, final
        self._planner = _Planner(stored, dtype, rank == 0)
        self._writer = _Writer(folder, final)
        self._metadata: Metadata | None = None

    def plan(self) -> bytes:
        """This rank's plan. Raises StoreError."""
        first = self._rank == 0
        with _as_store_error(self._path):
            self._planner.set_up_planner({}, self._writer.storage_meta(), first)
            self._writer.set_up_storage_writer(first)
            plan = self._planner.create_local_plan()
            return pickle.dumps(self._writer.prepare_local_plan(plan))

    def write(self, plans: list[bytes]) -> bytes:
        """Writes this rank's part, of the plans of all ranks. Raises what its values raise."""
        # Each rank makes the global plan from the same plans, so none has to send it.
        made = [pickle.loads(each) for each in plans]
        with _as_store_error(self._path):
            planned, self._metadata = self._planner.create_global_plan(made)
            planned = self._writer.prepare_global_plan(planned)
            mine = self._planner.finish_plan(planned[self._rank])
            written = self._writer.write_data(mine, self._planner)
            written.wait()
            return pickle.dumps(written.value())

    def finish(self, results: list[bytes]) -> None:
        """Writes the metadata; the first rank calls it. Raises StoreError."""
        assert self._metadata is not None
        found = [pickle.loads(each) for each in results]
        for each in found:
            for result in list(each):
                for key in self._planner.same.get(result.index.fqn, ()):
                    index = MetadataIndex(key, result.index.offset)
                    each.append(dataclasses.replace(result, index=index))
        with _as_store_error(self._path):
            self._writer.finish(self._metadata, found)


@contextmanager
def _as_store_error(path: Path) -> Iterator[None]:
    """Errors of the system inside the block are raised as StoreError."""
    try:
        yield
    except HeteroError:
        raise
    except (OSError, RuntimeError) as error:
        # torch.save() ends its archive after a failed write, too, and then raises that it cannot.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        text = f"cannot write the checkpoint: {cause.strerror}"
        raise StoreError(cause.errno, text, str(cause.filename or path)) from error
