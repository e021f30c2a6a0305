"""Exporting a managed model as a folder that Hugging Face's from_pretrained() reads.

All ranks plan an export alike: places of tensors follow from names, dtypes and shapes. The first
rank makes a folder beside the target with headers and configuration, every rank writes its own
ranges into the shared files, and when all have synced them the folder takes its place. Parameters
are written as they are, or rounded once from fp32 masters if another dtype is asked for; only then
is optimizer state read. Ties that the model declares are written once.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetero.api.access import engine_of
from hetero.api.whole_state import PART_NUMEL, Piece, read_own_parts
from hetero.checkpoint.manifest import TensorRecord
from hetero.checkpoint.pretrained.safetensors_checkpoint import INDEX_NAME
from hetero.checkpoint.pretrained.tensor_names import named_tensors, names_to_write, unwrapped
from hetero.checkpoint.pretrained.weight_files import METADATA, FilePlace, OpenFiles, WeightFiles
from hetero.checkpoint.safetensors_header import read
from hetero.chunks.dtypes import torch_dtype
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from offload.disk.durable import sync_path
from offload.disk.new_folder import NewFolder
from offload.errors import CheckpointError, HeteroError, StoreError
from offload.interrupts import uninterrupted
from offload.memory.sizes import parse_bytes

_SMALL_FILES = {"config.json", "generation_config.json", INDEX_NAME}
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
_SAME_CLASS: tuple[type[HeteroError], ...] = (CheckpointError, StoreError)


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
    world = engine.world
    first = world.everyone is None or world.everyone.rank == 0
    plan = world.together(
        "plan an export",
        lambda: _Plan.of(engine, model, dtype, parse_bytes(max_shard_bytes)),
        _SAME_CLASS,
    )
    world.require_equal({"the files": plan.files.digest}, "the exports")
    new = NewFolder(os.path.realpath(folder), "the export")
    opened: list[OpenFiles] = []

    def make() -> None:
        if first:
            _refuse_other(new.path)
            new.begin()
            _write_config(model, plan.dtype, new.incomplete)
            plan.files.make(new.incomplete)

    def open_files() -> None:
        new.require_seen(world.name)
        opened.append(OpenFiles(new.incomplete, plan.files))

    def write() -> None:
        plan.write(engine, opened[0])
        opened[0].sync()

    def complete() -> None:
        if first:
            for name in os.listdir(new.incomplete):
                sync_path(new.incomplete / name)
            new.complete()

    def explained(action: Callable[[], None]) -> None:
        with new.as_store_error(f"write the export {new.path}, which is as it was before"):
            action()

    steps = {"make": make, "open": open_files, "write": write, "complete": complete}
    try:
        for what, action in steps.items():
            world.together(f"{what} an export", partial(explained, action), _SAME_CLASS)
    finally:
        for each in opened:
            each.close()
        new.abandon()


@dataclass(frozen=True)
class _Plan:
    """The files of an export, and where tensors go in them, alike on all ranks.

    `dtype` is that of the parameters, for config.json.
    """

    dtype: torch.dtype
    files: WeightFiles
    managed: Mapping[ManagedParam, list[FilePlace]]
    plain: Sequence[tuple[torch.Tensor, FilePlace]]

    @classmethod
    def of(
        cls,
        engine: Engine,
        model: torch.nn.Module,
        dtype: str | torch.dtype | None,
        most_bytes: int,
    ) -> _Plan:
        """Raises ValueError."""
        if getattr(model, "peft_config", None):
            raise ValueError(
                "the model has adapters of PEFT; its own save_pretrained() writes these, and a "
                "whole model is what merge_and_unload() makes of them before initialize()"
            )
        given = None if dtype is None else torch_dtype(dtype)
        tensors = named_tensors(model)
        records = {}
        for name in names_to_write(model, tensors):
            known = engine.params.known(tensors[name])
            own = tensors[name].dtype if known is None else given or known.dtype
            records[name] = TensorRecord(tuple(tensors[name].shape), own)
        files = WeightFiles.of(records, most_bytes)
        managed: dict[ManagedParam, list[FilePlace]] = {}
        plain: list[tuple[torch.Tensor, FilePlace]] = []
        for name, place in files.places.items():
            known = engine.params.known(tensors[name])
            if known is None:
                plain.append((tensors[name], place))
            else:
                managed.setdefault(known, []).append(place)
        main = given or engine.chunk_groups[0].dtypes.torch_compute
        return cls(main, files, managed, plain)

    def write(self, engine: Engine, files: OpenFiles) -> None:
        """Writes what is this rank's. Raises OSError."""
        world = engine.world
        if world.replicas is not None and world.replicas.rank > 0:
            return  # another rank has the same shard
        if world.rank == 0:
            for tensor, place in self.plain:
                flat = tensor.detach().reshape(-1)
                for begin in range(0, flat.numel(), PART_NUMEL):
                    files.write(place, begin, flat[begin : begin + PART_NUMEL])

        def visit(piece: Piece) -> None:
            for place in self.managed[piece.managed]:
                own = place.dtype == piece.values.dtype
                values = piece.values if own else piece.master()
                files.write(place, piece.part.in_param.start, values)

        # Optimizer state has what completes values to masters, and is seven times as much to read.
        rounded = {
            m for m, places in self.managed.items() if all(p.dtype == m.dtype for p in places)
        }
        read_own_parts(engine, [m for m in self.managed if m in rounded], visit, states=False)
        read_own_parts(engine, [m for m in self.managed if m not in rounded], visit)


def _refuse_other(path: Path) -> None:
    """Raises ValueError if something is at `path` that must not be replaced."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise ValueError(f"{path} is there already, and is no folder; name another one")
    found = sorted(path.iterdir())
    weights = [each for each in found if _WEIGHTS.fullmatch(each.name)]
    others = [each.name for each in found if each.name not in _SMALL_FILES and each not in weights]
    if others:
        raise ValueError(
            f"{path} has {others[0]!r}, which save_pretrained() did not write and would remove; "
            f"name another folder"
        )
    for each in weights:
        try:
            writer = read(each).metadata.get("writer")
        except (CheckpointError, OSError) as error:
            raise ValueError(f"{path} is no earlier export: {error}; name another one") from error
        if writer != METADATA["writer"]:
            raise ValueError(
                f"{each} was not written by save_pretrained() of hetero, which would remove it; "
                f"name another folder"
            )
    if found and not weights:
        raise ValueError(f"{path} has files and no weights; name another folder")


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
