"""Reads parts of tensors, and small objects, of a DCP checkpoint."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from hetero.checkpoint.dcp.boxes import Box
from hetero.checkpoint.dcp.layout import Layout, param_groups
from hetero.checkpoint.dcp.metadata import read_metadata
from hetero.checkpoint.manifest import TensorRecord
from hetero.checkpoint.torch_file import check_memory, load_plain
from offload.errors import CheckpointError


class DcpReader:
    """The DCP checkpoint in a folder.

    What is asked for is read when it is asked for: a chunk of the checkpoint is in memory as a
    whole, as torch.save() has written it, one at a time.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the metadata. Raises CheckpointError."""
        self.folder = folder
        self.metadata = read_metadata(folder)
        self.layout = Layout.of(self.metadata)
        self.tensors = {
            key: TensorRecord(tuple(entry.size), entry.properties.dtype)
            for key, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.files = self._check_files()

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
        for key, (box, tensor) in wanted.items():
            entry = self.metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            covered = 0
            for chunk in entry.chunks if box.numel else ():
                stored = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                common = box.common_with(stored)
                if common is not None:
                    value = self._value(MetadataIndex(key, chunk.offsets))
                    if not isinstance(value, torch.Tensor) or tuple(value.shape) != stored.sizes:
                        raise CheckpointError(
                            f"{self.folder} is damaged in {key}: at {stored.offsets} is no tensor "
                            f"of shape {stored.sizes}"
                        )
                    check_memory(value, f"{key!r} of {self.folder}")
                    common.cut(tensor, box).copy_(common.cut(value, stored))
                    covered += common.numel
            if covered != box.numel:
                raise CheckpointError(
                    f"{self.folder} has {covered} of the {box.numel} elements of {key!r} that are "
                    f"at {box.offsets}: its chunks overlap or leave some out"
                )

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
        return {
            key: self.whole(key) if key in self.tensors else self._value(MetadataIndex(key))
            for key in keys
        }

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups, "params" by name. Raises CheckpointError."""
        try:
            return param_groups(self.layout, self.objects(self.layout.option_keys()))
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error

    def _value(self, index: MetadataIndex) -> Any:
        """What torch.save() was given. Raises CheckpointError."""
        place = self.metadata.storage_data[index]
        path, key = self.folder / place.relative_path, index.fqn
        try:
            with path.open("rb") as stream:
                stream.seek(place.offset)
                return load_plain(io.BytesIO(stream.read(place.length)), f"{key!r} of {path}")
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:
            names = re.findall(r"GLOBAL ([\w.]+)", str(error))
            what = f"names {names[0]}" if names else "is damaged, or has more than plain data"
            raise CheckpointError(
                f"{key!r} of the checkpoint {what}, which is not loaded: it could run anything"
            ) from None
        except Exception as error:  # (of whatever class torch's reading of a damaged file raises)
            raise CheckpointError(
                f"{path} cannot be read, or is damaged, in {key}: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}"
            ) from error
