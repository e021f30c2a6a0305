"""Writes a folder of Hugging Face's: safetensors files, and their index if there are several.

Parameters of a managed model are written as they are, or rounded once from fp32 masters if another
dtype is asked for; only then is optimizer state read. Ties that the model declares are written
once. All ranks plan the files alike: places of tensors follow from names, dtypes and shapes. Each
then writes its own ranges into the same files, and the first one their headers, too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hetero.api.access import engine_of
from hetero.checkpoint.checkpoint_write import CheckpointWrite
from hetero.checkpoint.engine_checkpoint import EngineCheckpoint
from hetero.checkpoint.manifest import TensorRecord, master_key, name_of
from hetero.checkpoint.pretrained.safetensors_checkpoint import (
    INDEX_NAME,
    WEIGHTS_NAME,
    StoredTensor,
)
from hetero.checkpoint.pretrained.tensor_names import named_tensors, names_to_write, unwrapped
from hetero.checkpoint.safetensors_header import encode, read
from hetero.checkpoint.save import save_into
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from hetero.chunks.dtypes import torch_dtype
from offload.disk.durable import write_all, write_durably
from offload.disk.new_folder import NewFolder
from offload.errors import CheckpointError
from offload.interrupts import uninterrupted
from offload.memory.sizes import parse_bytes

# By this an earlier export is told from a folder that somebody else has made.
METADATA = {"format": "pt", "writer": "hetero"}
_SMALL_FILES = {"config.json", "generation_config.json", INDEX_NAME}
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


@uninterrupted
@torch.no_grad()
def save_pretrained(
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: int | str = "5GiB",
) -> None:
    """Exports a managed model as a folder that Hugging Face's from_pretrained() reads.

    It has config.json and generation_config.json, if the model has such, and safetensors files with
    the parameters and buffers of state_dict(). Values go from where parameters live to the files, a
    few MiB at a time. All ranks must call it, between steps, and see the same folder: each writes
    what it keeps into the same files. What was there before stays until the new folder is whole and
    durable; if anything fails it is as it was.

    Names are those of state_dict(). Where transformers had converted a folder as it loaded it
    (fused experts, renamed layers) it reads these names, too; other programs may know only the
    folder's. Names that the model declares as tied (`_tied_weights_keys`) are written once. Not
    written are a tokenizer, and the code of a model that needs trust_remote_code.

    Args:
        model: one that went through hetero.initialize().
        folder: made with its parents; or empty, or an earlier export, which is replaced.
        dtype: "fp32", "bf16" or "fp16" (or torch's) of all parameters, rounded from fp32 masters.
            Default: the dtype that each computes in. Buffers keep their own.
        max_shard_bytes: a file has no more bytes of tensors, unless a single tensor has.

    Raises:
        ValueError: `folder` is something else or has other files, an option is wrong, the model has
            adapters of PEFT, or something that safetensors files cannot have.
        StoreError: the folder cannot be written.
        CheckpointError: a rank does not see the folder that the first one has made.
        UnmanagedParameterError: the model is not managed.
        HeteroError: another rank met one of these, or ranks differ.
    """
    model = unwrapped(model)
    engine = engine_of(model.parameters())
    engine.check_usable()
    new = _ExportFolder(os.path.realpath(folder), "the export")

    def make() -> PretrainedWrite:
        if getattr(model, "peft_config", None):
            raise ValueError(
                "the model has adapters of PEFT; its own save_pretrained() writes these, and a "
                "whole model is what merge_and_unload() makes of them before initialize()"
            )
        given = None if dtype is None else torch_dtype(dtype)
        others = _configs(model, given or engine.chunk_groups[0].dtypes.torch_compute)
        state = EngineCheckpoint(engine, [], part=model, dtype_of=lambda m: given or m.dtype)
        tensors = named_tensors(model, state.model.names)
        names = names_to_write(model, tensors)
        keys = {name: master_key(state.model.names[id(tensors[name])]) for name in names}
        most_bytes = parse_bytes(max_shard_bytes)
        return PretrainedWrite(state, keys, most_bytes, rank=state.rank, others=others)

    save_into(engine, new, "write an export", make)


class _ExportFolder(NewFolder):
    """A folder in whose place may be an earlier export."""

    def refuse_other(self) -> None:
        """See NewFolder."""
        path = self.path
        if not os.path.lexists(path):
            return
        if not path.is_dir():
            raise ValueError(f"{path} is there already, and is no folder; name another one")
        found = sorted(path.iterdir())
        weights = [each for each in found if _WEIGHTS.fullmatch(each.name)]
        others = {each.name for each in found if each not in weights} - _SMALL_FILES
        if others:
            raise ValueError(
                f"{path} has {min(others)!r}, which save_pretrained() did not write and would "
                f"remove; name another folder"
            )
        for each in weights:
            try:
                writer = read(each).metadata.get("writer")
            except CheckpointError as error:
                raise ValueError(
                    f"{path} is no earlier export: {error}; name another one"
                ) from error
            if writer != METADATA["writer"]:
                raise ValueError(
                    f"{each} was not written by save_pretrained() of hetero, which would remove "
                    f"it; name another folder"
                )
        if found and not weights:
            raise ValueError(f"{path} has files and no weights; name another folder")


class PretrainedWrite(CheckpointWrite):
    """Writes parameters and buffers as Hugging Face has them: one rank's part."""

    def __init__(
        self,
        stored: StoredCheckpoint,
        keys: Mapping[str, str],
        most_bytes: int,
        dtype: torch.dtype | None = None,
        rank: int = 0,
        others: Mapping[str, bytes] | None = None,
    ) -> None:
        """Nothing is written yet.

        Args:
            stored: has the values; of a model in training this rank's.
            keys: by the names that tensors get, the keys that `stored` has them by.
            most_bytes: a file has no more bytes of tensors, unless a single tensor has.
            dtype: of parameters; None: as they are stored. Buffers keep their own.
            rank: this rank's number; the first one makes the headers, the index and `others`.
            others: the content of further files, by name.

        Raises ValueError for what safetensors files cannot have.
        """
        super().__init__(stored)
        self._rank, self._others = rank, dict(others or {})
        self._heads: dict[str, bytes] = {}
        self._nbytes: dict[str, int] = {}
        self._places: dict[str, StoredTensor] = {}  # in the folder
        manifest = stored.manifest
        tensors = {name: manifest.tensors[key] for name, key in keys.items()}
        for name, tensor in tensors.items():
            if dtype is not None and name_of(keys[name]) in manifest.params:
                tensors[name] = replace(tensor, dtype=dtype)
        self._plan(_shards(tensors, most_bytes), tensors)
        # Names that are tied, and both written, have one key.
        self._by_key: dict[str, list[StoredTensor]] = {}
        for name, place in self._places.items():
            self._by_key.setdefault(keys[name], []).append(place)
        facts = repr((self._heads, self._nbytes))
        self.digest = hashlib.sha256(facts.encode()).hexdigest()

    def _plan(self, shards: list[list[str]], tensors: Mapping[str, TensorRecord]) -> None:
        """Decides where each tensor goes."""
        stem = Path(WEIGHTS_NAME).stem
        for number, names in enumerate(shards, 1):
            file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            file = WEIGHTS_NAME if len(shards) == 1 else file
            # Those of larger elements first: so all are aligned, and no reader must copy them.
            names.sort(key=lambda name: -tensors[name].dtype.itemsize)
            described = [(name, tensors[name].dtype, tensors[name].shape) for name in names]
            self._heads[file], header = encode(described, METADATA)
            self._nbytes[file] = header.file_bytes
            for name, entry in header.entries.items():
                offset = header.data_offset + entry.begin
                self._places[name] = StoredTensor(Path(file), entry, offset)

    def write(self, folder: Path) -> bytes:
        """See CheckpointWrite."""
        with ExitStack() as resources:
            files: dict[str, int] = {}
            for name in self._heads:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
                files[name] = os.open(folder / name, flags, 0o666)
                resources.callback(os.close, files[name])
            for name, head in self._heads.items() if self._rank == 0 else ():
                os.ftruncate(files[name], self._nbytes[name])
                write_all(files[name], head, 0)
            for key, begin, values in self.stored.contents(self._by_key):
                for place in self._by_key[key]:
                    dtype = place.entry.dtype
                    offset = place.offset + begin * dtype.itemsize
                    write_all(files[place.path.name], _bytes_of(values, dtype), offset)
            for descriptor in files.values():
                os.fsync(descriptor)
        return b""

    def finish(self, folder: NewFolder, parts: Sequence[bytes]) -> None:
        """See CheckpointWrite."""
        others = dict(self._others)
        if len(self._heads) > 1:
            total = sum(self._nbytes[name] - len(head) for name, head in self._heads.items())
            weight_map = {name: place.path.name for name, place in self._places.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            others[INDEX_NAME] = text.encode()
        for name, content in others.items():
            write_durably(folder.incomplete / name, content)


def _configs(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, bytes]:
    """The files that from_pretrained() makes the model from, where it is one of transformers'."""
    config: Any = getattr(model, "config", None)
    generation_config: Any = getattr(model, "generation_config", None)
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(config, "save_pretrained"):
            config = copy.deepcopy(config)
            config.architectures = [type(model).__name__]
            config.dtype = str(dtype).removeprefix("torch.")
            config.save_pretrained(folder)
        if hasattr(generation_config, "save_pretrained"):
            generation_config.save_pretrained(folder)
        return {each.name: each.read_bytes() for each in Path(folder).iterdir()}


def _shards(tensors: Mapping[str, TensorRecord], most_bytes: int) -> list[list[str]]:
    """The names of the tensors of each file."""
    shards: list[list[str]] = [[]]
    room = most_bytes
    for name, tensor in tensors.items():
        nbytes = tensor.numel * tensor.dtype.itemsize
        if nbytes > room and shards[-1]:
            shards.append([])
            room = most_bytes
        shards[-1].append(name)
        room -= nbytes
    return shards


def _bytes_of(values: torch.Tensor, dtype: torch.dtype) -> memoryview:
    dense = values.detach().to("cpu", dtype).contiguous()
    # (Of one element torch calls any stride contiguous, and then refuses other views of it.)
    memory: memoryview = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data
    return memory
