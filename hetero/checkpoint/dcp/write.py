"""Writes a checkpoint as DCP does, a piece at a time: one of another format, or a managed model.

DCP's checkpoints have no checksums, random numbers and `extra`: they are for exchange. Each rank
writes one file, in which torch.save() puts one box of a tensor after the other; the first one
writes .metadata, which says where each is. A flat range of a tensor is at most 2n - 1 boxes of n
dimensions.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import optim
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hetero.checkpoint.checkpoint_write import CheckpointWrite
from hetero.checkpoint.dcp.dcp_checkpoint import MODEL, OPTIMIZER, STEP
from hetero.checkpoint.dcp.metadata import METADATA_NAME, Box, boxes_of
from hetero.checkpoint.engine_checkpoint import EngineCheckpoint
from hetero.checkpoint.manifest import master_key, state_key
from hetero.checkpoint.plain_data import pack, unpack
from hetero.checkpoint.save import Optimizers, engine_and_optimizers, save_into
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from hetero.chunks.dtypes import torch_dtype
from offload.disk.durable import write_durably
from offload.disk.new_folder import NewFolder
from offload.errors import CheckpointError
from offload.interrupts import uninterrupted

_OWN = ("bias_correction", "adamw_mode")  # options that torch's optimizers lack

KeyPath = tuple[str | int, ...]  # of a key in the nested state dict


@uninterrupted
@torch.no_grad()
def save_dcp(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    *,
    dtype: str | torch.dtype = "fp32",
) -> None:
    """Saves a managed model as a checkpoint of torch.distributed.checkpoint (DCP).

    dcp.load() reads it into FSDP2's and plain torch's state dicts, whatever their ranks: the layout
    is {"model": ..., "optim": ...} with what torch's get_state_dict(model, optimizer) gives. All
    ranks must call it, between steps: each writes its own shards, from their homes, a few MiB at a
    time. Names of tied parameters share their bytes.

    It has no random numbers, no loss scale, no `extra` and no checksums: to go on with the same
    bits, use hetero.save().

    Args:
        path: the checkpoint's folder, which must not be there yet, or be empty; all ranks must see
            the same one.
        model: as hetero.initialize() returned it.
        optimizer: likewise, or the list; their states are in fp32, their options in the words of
            torch's optimizers. Default: parameters and buffers alone.
        dtype: of parameters, "fp32" (default: the masters as they are), "bf16" or "fp16" (or
            torch's); buffers keep their own.

    Raises:
        ValueError: something is at `path`, or torch's optimizers have no such option.
        StoreError, NativeIoError: the files cannot be written. Nothing is left then.
        CheckpointError: a rank does not see the folder that the first one has made.
        HeteroError: another rank met one of these.
    """
    engine, optimizers = engine_and_optimizers(model, optimizer)
    engine.check_usable()
    wanted, folder = torch_dtype(dtype), NewFolder(path)

    def make() -> DcpWrite:
        dtype_of = None if optimizers else lambda _: wanted
        state = EngineCheckpoint(engine, optimizers, dtype_of=dtype_of)
        return DcpWrite(state, wanted, state.rank)

    save_into(engine, folder, f"save {folder.path}", make)


@dataclass
class _Part:
    """What a rank has written, by DCP's keys: metadata, places, and paths in the state dict."""

    entries: dict[str, Any] = field(default_factory=dict)
    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)

    def add(self, other: _Part) -> None:
        for key, entry in other.entries.items():
            known = self.entries.setdefault(key, entry)
            if known is not entry:
                known.chunks.extend(entry.chunks)
        self.places |= other.places
        self.paths |= other.paths


class DcpWrite(CheckpointWrite):
    """Writes DCP's format: one rank's part of it."""

    def __init__(self, stored: StoredCheckpoint, dtype: torch.dtype | None, rank: int = 0) -> None:
        """Nothing is written yet.

        Args:
            stored: the checkpoint, or this rank's part of a model in training.
            dtype: of parameters; None: as they are stored. States are fp32.
            rank: this rank's number; the first one writes what is small.
        """
        super().__init__(stored)
        self._rank = rank
        self._name = f"__{rank}_0.distcp"
        self._part = _Part()
        manifest = stored.manifest
        # By hetero's key: the path in the state dict, and the dtype.
        self._written: dict[str, tuple[KeyPath, torch.dtype]] = {}
        for name in (*manifest.params, *manifest.buffers):
            own = dtype if name in manifest.params else None
            wanted = own or manifest.tensors[master_key(name)].dtype
            self._written[master_key(name)] = (MODEL, name), wanted
        for optimizer in manifest.optimizers:
            for name in (name for group in optimizer.groups for name in group.params):
                if name in manifest.params and manifest.params[name].trained:
                    for state in optimizer.states:
                        path = (OPTIMIZER, "state", name, state)
                        self._written[state_key(name, state)] = path, torch.float32
        self.digest = repr(self._written)

    def write(self, folder: Path) -> bytes:
        """See CheckpointWrite. Raises ValueError, too."""
        tensors = self.stored.manifest.tensors
        with (folder / self._name).open("xb") as stream:
            if self._rank == 0:
                self._write_small(stream)
            for key, begin, flat in self.stored.contents(self._written):
                path, dtype = self._written[key]
                shape, done, end = tensors[key].shape, 0, begin + flat.numel()
                for box in boxes_of(shape, begin, end) if end > begin else ():
                    # (A copy: torch.save() writes all of a view's memory.)
                    part = flat[done : done + box.numel].to(device="cpu", dtype=dtype, copy=True)
                    self._write_box(stream, path, shape, box, part.view(box.sizes))
                    done += box.numel
            stream.flush()
            os.fsync(stream.fileno())
        return pickle.dumps(self._part)

    def _write_small(self, stream: Any) -> None:
        """Options, steps and tensors without elements."""
        manifest = self.stored.manifest
        for key, (path, dtype) in self._written.items():
            shape = manifest.tensors[key].shape
            if not manifest.tensors[key].numel:
                nothing = Box((0,) * len(shape), shape)
                self._write_box(
                    stream, path, shape, nothing, torch.empty(shape, dtype=dtype, device="cpu")
                )
        groups = [group for each in manifest.optimizers for group in each.groups]
        for number, group in enumerate(groups):
            options = _torch_options(self.stored, group.options, f"param group {number}")
            for option, value in {**options, "params": list(group.params)}.items():
                key = self._key((OPTIMIZER, "param_groups", number, option))
                self._part.entries[key] = BytesStorageMetadata()
                self._part.places[MetadataIndex(key)] = self._save(stream, value)
            for name in group.params:
                if name in manifest.params and manifest.params[name].trained:
                    step = torch.tensor(
                        float(manifest.params[name].step), dtype=torch.float32, device="cpu"
                    )
                    path = (OPTIMIZER, "state", name, STEP)
                    self._write_box(stream, path, (), Box((), ()), step)

    def _key(self, path: KeyPath) -> str:
        """The path as DCP flattens state dicts."""
        key = ".".join(map(str, path))
        self._part.paths[key] = path
        return key

    def _write_box(
        self, stream: Any, path: KeyPath, shape: Sequence[int], box: Box, value: torch.Tensor
    ) -> None:
        key, offsets = self._key(path), torch.Size(box.offsets)
        properties = TensorProperties(value.dtype)
        made = TensorStorageMetadata(properties, torch.Size(shape), [])
        entry = self._part.entries.setdefault(key, made)
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
        self._part.places[MetadataIndex(key, offsets)] = self._save(stream, value)

    def _save(self, stream: Any, value: Any) -> _StorageInfo:
        content = io.BytesIO()
        torch.save(value, content)
        begin = stream.tell()
        stream.write(content.getbuffer())
        return _StorageInfo(self._name, begin, stream.tell() - begin)

    def finish(self, folder: NewFolder, parts: Sequence[bytes]) -> None:
        """See CheckpointWrite; the parts are pickles that come from no file."""
        whole = _Part()
        for part in parts:
            whole.add(pickle.loads(part))
        # Tied parameters: keys that have the values of another one.
        for name, param in self.stored.manifest.params.items():
            first = f"{MODEL}.{name}"
            for alias in param.aliases:
                other = f"{MODEL}.{alias}"
                whole.paths[other], whole.entries[other] = (MODEL, alias), whole.entries[first]
                for chunk in whole.entries[first].chunks:
                    place = whole.places[MetadataIndex(first, chunk.offsets)]
                    whole.places[MetadataIndex(other, chunk.offsets)] = place
        metadata = Metadata(
            whole.entries,
            planner_data=whole.paths,
            storage_data=whole.places,
            storage_meta=StorageMeta(str(folder.path)),
        )
        write_durably(folder.incomplete / METADATA_NAME, pickle.dumps(metadata))


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
    defaults: dict[str, Any] = torch_class([torch.zeros(1, 1, device="cpu")]).defaults
    return {**defaults, **{name: value for name, value in options.items() if name not in _OWN}}


def _torch_class(options: Mapping[str, Any]) -> Any:
    """torch's optimizer of the rule that has these options; None for Lion."""
    if "adamw_mode" in options:
        return optim.AdamW if options["adamw_mode"] else optim.Adam
    own_options = {"lr_decay": optim.Adagrad, "dampening": optim.SGD, "ns_steps": optim.Muon}
    return next((found for option, found in own_options.items() if option in options), None)
