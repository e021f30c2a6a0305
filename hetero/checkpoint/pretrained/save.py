"""Exporting a managed model as a folder that Hugging Face's from_pretrained() reads.

All ranks plan an export alike: places of tensors follow from names, dtypes and shapes. The first
rank makes a folder beside the target with headers and configuration, every rank writes its own
ranges into the shared files, and when all have synced them the folder takes its place. Parameters
are written as they are, or rounded once from fp32 masters if another dtype is asked for; only then
is optimizer state read. Ties that the model declares are written once.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.api.access import engine_of
from hetero.api.whole_state import PART_NUMEL, Piece, read_own_parts
from hetero.checkpoint.pretrained.export_folder import (
    METADATA,
    ExportFiles,
    NewFile,
    export_folder,
)
from hetero.checkpoint.pretrained.stored_tensors import INDEX_NAME, WEIGHTS_NAME
from hetero.checkpoint.pretrained.tensor_names import named_tensors, names_to_write, unwrapped
from hetero.checkpoint.safetensors_header import encode
from hetero.chunks.dtypes import Dtypes, check_dtype
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from offload.errors import CheckpointError, StoreError
from offload.interrupts import uninterrupted
from offload.memory.sizes import parse_bytes


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
    world, failure, plan = engine.world, None, None
    try:
        plan = _Plan.of(engine, model, dtype, parse_bytes(max_shard_bytes))
    except Exception as error:
        failure = error
    world.all_or_none(failure, "plan an export", (CheckpointError, StoreError))
    assert plan is not None
    world.require_equal({"the files": plan.digest}, "the exports")

    def write_small_files(path: Path) -> None:
        _write_config(model, plan.dtype, path)
        if len(plan.files) > 1:
            (path / INDEX_NAME).write_text(plan.index, encoding="utf-8")

    with export_folder(Path(folder), world, plan.files, write_small_files) as files:
        plan.write(engine, files)


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes: byte `offset` of a file, in a dtype."""

    file: str
    offset: int
    dtype: torch.dtype

    def write(self, files: ExportFiles, begin: int, values: torch.Tensor) -> None:
        """Writes flat elements from number `begin` on."""
        offset = self.offset + begin * self.dtype.itemsize
        files.write(self.file, offset, values.to(self.dtype))


@dataclass(frozen=True)
class _Plan:
    """The files of an export, and the places of tensors in them, alike on all ranks.

    `dtype` is that of the parameters, for config.json; `index` the content of the index.
    """

    dtype: torch.dtype
    files: Mapping[str, NewFile]
    index: str
    managed: Mapping[ManagedParam, list[_Place]]
    plain: Sequence[tuple[torch.Tensor, _Place]]

    @classmethod
    def of(
        cls,
        engine: Engine,
        model: torch.nn.Module,
        dtype: str | torch.dtype | None,
        max_shard_bytes: int,
    ) -> _Plan:
        """Raises ValueError."""
        if getattr(model, "peft_config", None):
            raise ValueError(
                "the model has adapters of PEFT; its own save_pretrained() writes these, and a "
                "whole model is what merge_and_unload() makes of them before initialize()"
            )
        given = None if dtype is None else _torch_dtype(str(dtype))
        tensors = named_tensors(model)
        names = names_to_write(model, tensors)
        dtypes = {}
        for name in names:
            known = engine.params.known(tensors[name])
            own = tensors[name].dtype if known is None else known.dtype
            dtypes[name] = own if known is None or given is None else given
        shards = _sharded(names, tensors, dtypes, max_shard_bytes)
        files: dict[str, NewFile] = {}
        weight_map: dict[str, str] = {}
        managed: dict[ManagedParam, list[_Place]] = {}
        plain: list[tuple[torch.Tensor, _Place]] = []
        for file, shard in _file_names(shards):
            head, header = encode(
                [(name, dtypes[name], tuple(tensors[name].shape)) for name in shard], METADATA
            )
            files[file] = NewFile(head, header.file_bytes)
            for name, entry in header.entries.items():
                place = _Place(file, header.data_offset + entry.begin, entry.dtype)
                known = engine.params.known(tensors[name])
                if known is None:
                    plain.append((tensors[name], place))
                else:
                    managed.setdefault(known, []).append(place)
                weight_map[name] = file
        total = sum(file.nbytes - len(file.head) for file in files.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        main = given or engine.chunk_groups[0].dtypes.torch_compute
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        return cls(main, files, text, managed, plain)

    @property
    def digest(self) -> str:
        """The same on all ranks if they write the same files."""
        facts = [(name, file.head, file.nbytes) for name, file in self.files.items()]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def write(self, engine: Engine, files: ExportFiles) -> None:
        """Writes what is this rank's. Raises OSError."""
        world = engine.world
        if world.replicas is not None and world.replicas.rank > 0:
            return  # another rank has the same shard
        if world.rank == 0:
            for tensor, place in self.plain:
                flat = tensor.detach().reshape(-1)
                for begin in range(0, flat.numel(), PART_NUMEL):
                    place.write(files, begin, flat[begin : begin + PART_NUMEL])

        def visit(piece: Piece) -> None:
            for place in self.managed[piece.managed]:
                own = place.dtype == piece.values.dtype
                values = piece.values if own else piece.master()
                place.write(files, piece.part.in_param.start, values)

        # Optimizer state has what completes values to masters, and is seven times as much to read.
        rounded = [m for m, places in self.managed.items() if _have_dtype(places, m.dtype)]
        others = [m for m in self.managed if m not in set(rounded)]
        read_own_parts(engine, rounded, visit, states=False)
        read_own_parts(engine, others, visit)


def _have_dtype(places: Sequence[_Place], dtype: torch.dtype) -> bool:
    return all(place.dtype == dtype for place in places)


def _torch_dtype(name: str) -> torch.dtype:
    compute = check_dtype(name, "dtype")
    return Dtypes(compute, compute).torch_compute


def _sharded(
    names: Sequence[str],
    tensors: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
    max_bytes: int,
) -> list[list[str]]:
    """The names of each file, in the order of `names`, but for elements of larger dtypes first.

    So all data are aligned to their elements: none of the format's readers must copy them.
    """
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name in names:
        nbytes = tensors[name].numel() * dtypes[name].itemsize
        if nbytes > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= nbytes
    return [sorted(shard, key=lambda name: -dtypes[name].itemsize) for shard in shards]


def _file_names(shards: Sequence[list[str]]) -> list[tuple[str, list[str]]]:
    if len(shards) == 1:
        return [(WEIGHTS_NAME, shards[0])]
    stem = Path(WEIGHTS_NAME).stem
    count = len(shards)
    return [
        (f"{stem}-{number:05d}-of-{count:05d}.safetensors", shard)
        for number, shard in enumerate(shards, start=1)
    ]


def _write_config(model: torch.nn.Module, dtype: torch.dtype, path: Path) -> None:
    """What from_pretrained() makes the model from, where it is one of transformers'."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        # transformers called it torch_dtype before 4.56.
        name = "dtype" if hasattr(config, "dtype") else "torch_dtype"
        setattr(config, name, str(dtype).removeprefix("torch."))
        config.save_pretrained(path)
    generation_config: Any = getattr(model, "generation_config", None)
    if hasattr(generation_config, "save_pretrained"):
        generation_config.save_pretrained(path)
