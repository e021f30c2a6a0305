"""A managed model exported as a folder of Hugging Face's, and loaded from one.

Parameters are written as they are, or rounded once from fp32 masters if another dtype is asked for;
only then is optimizer state read. Ties that the model declares are written once. A folder that is
loaded is a checkpoint whose tensors get the model's names; values become masters unrounded. Tensors
that transformers converts as it loads (fused experts, renamed layers) are for from_pretrained()
inside ZeroInitContext.
"""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import torch

from hetero.api.access import engine_of
from hetero.checkpoint.engine_checkpoint import EngineCheckpoint, ModelTensors
from hetero.checkpoint.load import load_from
from hetero.checkpoint.manifest import master_key
from hetero.checkpoint.pretrained.safetensors_checkpoint import INDEX_NAME, SafetensorsCheckpoint
from hetero.checkpoint.pretrained.tensor_names import (
    NameMatch,
    named_tensors,
    names_to_write,
    unwrapped,
)
from hetero.checkpoint.pretrained.weight_files import METADATA, PretrainedWrite
from hetero.checkpoint.safetensors_header import read
from hetero.checkpoint.save import begin_saving
from hetero.chunks.dtypes import torch_dtype
from hetero.runtime.engine import Engine
from offload.disk.durable import sync_path
from offload.disk.new_folder import NewFolder
from offload.errors import CheckpointError
from offload.interrupts import uninterrupted
from offload.memory.sizes import parse_bytes

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

    def make() -> _ModelWrite:
        return _ModelWrite(engine, model, dtype, parse_bytes(max_shard_bytes))

    begin_saving(engine, new, "write an export", make).wait()


class _ModelWrite(PretrainedWrite):
    """One rank's part of an export of a managed model."""

    def __init__(
        self,
        engine: Engine,
        model: torch.nn.Module,
        dtype: str | torch.dtype | None,
        most_bytes: int,
    ) -> None:
        """Raises ValueError."""
        if getattr(model, "peft_config", None):
            raise ValueError(
                "the model has adapters of PEFT; its own save_pretrained() writes these, and a "
                "whole model is what merge_and_unload() makes of them before initialize()"
            )
        given = None if dtype is None else torch_dtype(dtype)
        state = EngineCheckpoint(engine, [], part=model, dtype_of=lambda m: given or m.dtype)
        tensors = named_tensors(model, state.model.names)
        names = names_to_write(model, tensors)
        keys = {name: master_key(state.model.names[id(tensors[name])]) for name in names}
        super().__init__(state, keys, most_bytes, rank=state.rank)
        self._model = model
        self._dtype = given or engine.chunk_groups[0].dtypes.torch_compute

    def begin(self, folder: Path) -> None:
        """See CheckpointWrite."""
        _write_config(self._model, self._dtype, folder)
        for each in folder.iterdir():
            sync_path(each)


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


@uninterrupted
@torch.no_grad()
def load_pretrained(
    model: torch.nn.Module, folder: str | os.PathLike[str], strict: bool = True
) -> Any:
    """Loads a folder of Hugging Face's into the parameters and buffers of a managed model.

    Values go from the files to where parameters live, a few MiB at a time, so the model may be
    larger than RAM; each rank reads what it keeps. All ranks must call it. Values become the
    masters, unrounded, and parameters their rounding; the optimizer's states stay. Names are those
    of the model's state_dict(), with or without its `base_model_prefix`; of tied ones the folder
    need have one.

    What transformers converts as it loads (fused experts, renamed layers) is not converted: load
    such a folder with from_pretrained() inside hetero.ZeroInitContext.

    Args:
        model: one that went through hetero.initialize().
        folder: has model.safetensors, or model.safetensors.index.json and its files; or one
            safetensors file. Each rank may have a copy of its own.
        strict: False: names that only one of model and folder has are returned instead of raised.

    Returns:
        what torch's load_state_dict() does: a named tuple of `missing_keys` and `unexpected_keys`.

    Raises:
        ValueError: names are missing or unexpected, or a tensor has another shape or a dtype that
            does not fit. Nothing is changed then.
        CheckpointError: there is no such folder, its files are damaged, or ranks have different
            ones. If values turn out to be missing while they are loaded, or cannot be read, the
            model is half loaded, and refuses to be used until it is loaded again.
        StoreError: a file cannot be read.
        UnmanagedParameterError: the model is not managed.
        HeteroError: another rank met one of these.
    """
    model = unwrapped(model)
    engine = engine_of(model.parameters())
    found: list[NameMatch] = []

    def open_stored() -> SafetensorsCheckpoint:
        stored = SafetensorsCheckpoint(Path(folder))
        found.append(_take_names_of(engine, model, stored, strict))
        return stored

    # (The text is alike on all ranks; their folders may have different names.)
    load_from(open_stored, engine, [], {}, "a pretrained model", model)
    (names,) = found
    return torch.nn.modules.module._IncompatibleKeys(names.missing, names.unexpected)


def _take_names_of(
    engine: Engine, model: torch.nn.Module, stored: SafetensorsCheckpoint, strict: bool
) -> NameMatch:
    """Gives the tensors of a folder the model's names.

    Raises ValueError for tied names with different values.
    """
    own = ModelTensors.of(engine, model)
    tensors = named_tensors(model, own.names)
    names = NameMatch(model, tensors, stored.tensors)
    found: dict[str, str] = {} if not strict else {name: name for name in names.unexpected}
    for name, tensor in tensors.items():
        if name in names.stored:
            first = found.setdefault(own.names[id(tensor)], names.stored[name])
            if first != names.stored[name]:
                _require_alike(stored, first, names.stored[name])
    stored.rename({name: stored.tensors[stored_name] for name, stored_name in found.items()})
    missing = {own.names[id(tensors[name])] for name in names.missing if strict}
    stored.may_lack = {*own.params, *own.plain} - missing
    stored.remedy = (
        "strict=False passes over names that only one of them has. Where transformers converts a "
        "folder as it loads it, call from_pretrained() inside hetero.ZeroInitContext instead"
    )
    return names


def _require_alike(stored: SafetensorsCheckpoint, one: str, other: str) -> None:
    """Raises ValueError if names that are tied in the model have different values in the files."""
    pairs = zip(stored.parts(master_key(one)), stored.parts(master_key(other)), strict=False)
    first, second = stored.tensors[one].entry, stored.tensors[other].entry
    same = (first.dtype, first.shape) == (second.dtype, second.shape)
    if not same or not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
        raise ValueError(
            f"{one!r} and {other!r} are one tensor in the model, and have different values in "
            f"{stored.path}; build the model without tying them"
        )
