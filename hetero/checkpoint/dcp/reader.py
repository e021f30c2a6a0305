"""Reads parts of tensors, and small objects, of a DCP checkpoint by torch's FileSystemReader."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hetero.checkpoint.dcp.boxes import Box
from hetero.checkpoint.dcp.layout import Layout, param_groups
from hetero.checkpoint.dcp.metadata import read_metadata
from hetero.checkpoint.torch_file import load_plain
from offload.errors import CheckpointError


@dataclass(frozen=True)
class StoredTensor:
    """What the checkpoint says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class DcpReader:
    """The DCP checkpoint in a folder.

    What is asked for is read when it is asked for: a chunk of the checkpoint is in memory as a
    whole, as torch reads it, one at a time.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the metadata. Raises CheckpointError."""
        self.folder = folder
        self.metadata = read_metadata(folder)
        self.layout = Layout.of(self.metadata)
        self.tensors = {
            key: StoredTensor(tuple(entry.size), entry.properties.dtype)
            for key, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.files = self._check_files()
        self._reader = _Reader(folder, self.metadata)
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def _check_files(self) -> dict[str, int]:
        """The sizes of the files. Raises CheckpointError if one is missing or too short."""
        ends: dict[str, int] = {}
        for place in self.metadata.storage_data.values():
            end = place.offset + place.length
            ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
        sizes = {}
        for name, end in ends.items():
            path = self.folder / name
            try:
                sizes[name] = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            if sizes[name] < end:
                raise CheckpointError(
                    f"{path} has {sizes[name]} bytes, and the checkpoint needs {end} of it"
                )
        return sizes

    def fill(self, wanted: Mapping[str, tuple[Box, torch.Tensor]]) -> None:
        """Fills tensors, by key: each gets a box of the stored tensor, in its own dtype.

        Raises CheckpointError.
        """
        items: list[ReadItem] = []
        for key, (box, _) in wanted.items():
            if not box.numel:
                continue
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            entry = self.metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(key, entry, [chunk])
            covered = sum(item.lengths.numel() for item in found)
            if covered != box.numel:
                raise CheckpointError(
                    f"{self.folder} has {covered} of the {box.numel} elements of {key!r} that are "
                    f"at {box.offsets}: its chunks overlap or leave some out"
                )
            items += found
        self._read(items, _Planner(self.metadata, {key: t for key, (_, t) in wanted.items()}))

    def whole(self, key: str) -> torch.Tensor:
        """A tensor, in the dtype that is stored. Raises CheckpointError."""
        stored = self.tensors[key]
        found = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill({key: (Box((0,) * found.ndim, stored.shape), found)})
        return found

    def objects(self, keys: Iterable[str]) -> dict[str, Any]:
        """Small things by key: what is not a tensor is unpickled as torch.load() does with
        weights_only=True, which refuses everything but plain data and tensors.

        Raises CheckpointError.
        """
        found: dict[str, Any] = {}
        items = []
        for key in keys:
            if isinstance(self.metadata.state_dict_metadata[key], BytesStorageMetadata):
                index = MetadataIndex(key)
                nothing = torch.Size((0,))
                items.append(
                    ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
                )
            else:
                found[key] = self.whole(key)
        planner = _Planner(self.metadata, {})
        self._read(items, planner)
        return found | planner.objects

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups, "params" by name. Raises CheckpointError."""
        try:
            return param_groups(self.layout, self.objects(self.layout.option_keys()))
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error

    def _read(self, items: list[ReadItem], planner: _Planner) -> None:
        plan = self._reader.prepare_local_plan(LoadPlan(items))
        try:
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {error}") from None
        except Exception as error:  # (of whatever class torch's reading of a damaged file raises)
            keys = sorted({item.storage_index.fqn for item in items})
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise CheckpointError(
                f"{self.folder} cannot be read, or is damaged, in {', '.join(keys[:3])}{more}: "
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error


class _Reader(FileSystemReader):
    """torch's, with metadata that were read without pickle.load()."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What was read before."""
        return self._metadata


class _Planner(LoadPlanner):
    """Gives torch's reader the tensors that it fills, by key, and takes objects from it."""

    def __init__(self, metadata: Metadata, tensors: Mapping[str, torch.Tensor]) -> None:
        self._metadata, self._tensors = metadata, tensors
        self.objects: dict[str, Any] = {}

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError("DcpReader makes the plans")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.objects[key] = load_plain(value, f"{key!r} of the checkpoint")
        except pickle.UnpicklingError as error:
            names = re.findall(r"GLOBAL ([\w.]+)", str(error))
            what = f"names {names[0]}" if names else "is damaged, or has more than plain data"
            raise CheckpointError(
                f"{key!r} of the checkpoint {what}, which is not loaded: it could run anything"
            ) from None

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        raise NotImplementedError("objects are loaded by load_bytes()")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        found = self._tensors[read_item.dest_index.fqn]
        places = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (offset, length) in enumerate(places):
            found = found.narrow(dim, offset, length)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...
