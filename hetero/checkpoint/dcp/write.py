"""Writes a DCP checkpoint by torch's FileSystemWriter, a piece at a time, as they are asked for."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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

from hetero.checkpoint.dcp.boxes import Box
from offload.errors import CheckpointError, HeteroError, StoreError

_BUFFERS = 8  # of different sizes, for values that are being written

KeyPath = tuple[str | int, ...]  # of a key in the nested state dict


@dataclass(frozen=True)
class Item:
    """A box of a tensor that this rank writes; `path` is that of its key in the state dict."""

    path: KeyPath
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box

    @property
    def key(self) -> str:
        """As DCP flattens state dicts."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True)
class Part:
    """What one rank writes.

    Attributes:
        items: boxes of tensors, in the order in which `values` gives them.
        values: the boxes' values; each is copied before the next one is asked for.
        objects: small things by path: options of param groups.
        same: paths of keys that have the values of another key, by that one: tied parameters.
    """

    items: list[Item]
    values: Iterable[torch.Tensor]
    objects: Mapping[KeyPath, Any] = field(default_factory=dict)
    same: Mapping[str, list[KeyPath]] = field(default_factory=dict)


class _Planner(DefaultSavePlanner):
    """torch's planner, whose local plan is a Part, and which gives values as they are written."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._part = part
        self._values: Iterator[torch.Tensor] = iter(part.values)
        self._next = 0
        self._buffers: OrderedDict[int, torch.Tensor] = (
            OrderedDict()
        )  # by bytes, the last at the end
        self._objects = {".".join(map(str, path)): obj for path, obj in part.objects.items()}

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects] + [
            _write_item(item) for item in self._part.items
        ]
        paths = {item.key: item.path for item in self._part.items}
        paths |= {".".join(map(str, path)): path for path in self._part.objects}
        self.plan = SavePlan(items, planner_data=paths)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        paths = dict(metadata.planner_data)
        for key, others in self._part.same.items():
            for path in others:
                name = ".".join(map(str, path))
                metadata.state_dict_metadata[name] = metadata.state_dict_metadata[key]
                paths[name] = path
        return plans, dataclasses.replace(metadata, planner_data=paths)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self._objects[key], stream)
            return stream
        wanted = self._part.items[self._next]
        if (wanted.key, torch.Size(wanted.box.offsets)) != (key, write_item.index.offset):
            raise CheckpointError(f"this torch writes {key} before {wanted.key}, out of order")
        self._next += 1
        value = next(self._values)
        assert value.shape == wanted.box.sizes, key
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


def _write_item(item: Item) -> WriteItem:
    offsets, sizes = torch.Size(item.box.offsets), torch.Size(item.box.sizes)
    return WriteItem(
        MetadataIndex(item.key, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, sizes),
            TensorProperties(item.dtype),
            torch.Size(item.shape),
        ),
    )


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

    def __init__(self, folder: Path, final: Path, part: Part, rank: int) -> None:
        """Nothing is written yet.

        Args:
            folder: where the files are made.
            final: where the folder is going to be.
            part: what this rank writes.
            rank: this rank's number.
        """
        self._part, self._rank = part, rank
        self._planner = _Planner(part)
        self._writer = _Writer(folder, final)
        self._path = final
        self._metadata: Metadata | None = None

    def plan(self) -> bytes:
        """This rank's plan. Raises StoreError."""
        first = self._rank == 0
        with _as_store_error(self._path):
            self._planner.set_up_planner({}, self._writer.storage_meta(), first)
            self._writer.set_up_storage_writer(first, rank=self._rank, use_collectives=True)
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
                for path in self._part.same.get(result.index.fqn, ()):
                    index = MetadataIndex(".".join(map(str, path)), result.index.offset)
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
