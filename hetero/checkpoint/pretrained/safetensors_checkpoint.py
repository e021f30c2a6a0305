"""Folders of Hugging Face's, and single safetensors files, for reading.

One that is loaded into a managed model gets the model's names; values become masters unrounded.
Tensors that transformers converts as it loads (fused experts, renamed layers) are for
from_pretrained() inside ZeroInitContext.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.api.access import engine_of
from hetero.checkpoint.engine_checkpoint import ModelTensors
from hetero.checkpoint.load import load_from
from hetero.checkpoint.manifest import TensorRecord, master_key
from hetero.checkpoint.pretrained.tensor_names import NameMatch, named_tensors, unwrapped
from hetero.checkpoint.safetensors_header import MAX_HEADER_BYTES, Entry, read
from hetero.checkpoint.schema import content_of, parse_json, typed
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint, make_manifest
from hetero.runtime.engine import Engine
from offload.errors import CheckpointError, StoreError
from offload.interrupts import uninterrupted

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


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


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, whose elements begin at byte `offset` of it."""

    path: Path
    entry: Entry
    offset: int


class SafetensorsCheckpoint(StoredCheckpoint):
    """Tensors by name, and no optimizer state.

    Attributes:
        tensors: by name.
    """

    def __init__(self, path: Path) -> None:
        """Reads the index and the headers of all files.

        Raises:
            CheckpointError: there are no such files, or they are damaged or contradict each other.
            StoreError: one cannot be opened or read.
        """
        super().__init__(path)
        self.kind = "Hugging Face folder" if path.is_dir() else "safetensors file"
        self.rename(_find_tensors(path))
        facts = repr([(n, s.path.name, s.entry, s.offset) for n, s in self.tensors.items()])
        self.digest = hashlib.sha256(facts.encode()).hexdigest()
        paths = {stored.path for stored in self.tensors.values()}
        self.files = {each.name: each.stat().st_size for each in sorted(paths)}

    def rename(self, tensors: dict[str, StoredTensor]) -> None:
        """From here on it has these tensors alone, by these names."""
        self.tensors = tensors
        self.manifest = make_manifest(
            {name: TensorRecord(t.entry.shape, t.entry.dtype) for name, t in tensors.items()}
        )

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """See StoredCheckpoint."""
        stored = self.tensors[key.partition("/")[2]]
        found = torch.empty(end - begin, dtype=stored.entry.dtype, device="cpu")
        memory, done = found.view(torch.uint8).numpy().data, 0
        try:
            descriptor = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while done < len(memory):
                    offset = stored.offset + begin * found.itemsize + done
                    count = os.preadv(descriptor, [memory[done:]], offset)
                    if not count:
                        raise CheckpointError(
                            f"{stored.path} ends at byte {offset}, inside of "
                            f"{stored.entry.name!r}; it was longer when its header was read"
                        )
                    done += count
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _store_error(error, stored.path) from error
        return found


def _find_tensors(path: Path) -> dict[str, StoredTensor]:
    try:
        if not path.is_dir():
            return _tensors_of([path])
        if (path / WEIGHTS_NAME).exists():
            return _tensors_of([path / WEIGHTS_NAME])
        index = path / INDEX_NAME
        if not index.exists():
            raise CheckpointError(
                f"{path} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; weights in other formats are "
                f"loaded by from_pretrained() inside hetero.ZeroInitContext"
            )
        names = _read_index(index)
        found = _tensors_of(path / name for name in sorted(set(names.values())))
    except OSError as error:
        raise _store_error(error, path) from error
    for name, file_name in names.items():
        if name not in found or found[name].path.name != file_name:
            raise CheckpointError(f"{index} says that {name!r} is in {file_name}, and it is not")
    return found


def _tensors_of(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for path in paths:
        header = read(path)
        for name, entry in header.entries.items():
            if name in found:
                raise CheckpointError(f"{found[name].path} and {path} both have {name!r}")
            found[name] = StoredTensor(path, entry, header.data_offset + entry.begin)
    return found


def _read_index(path: Path) -> dict[str, str]:
    """The names of files by the names of tensors."""
    index = parse_json(content_of(path, MAX_HEADER_BYTES, "Hugging Face folder"), str(path))
    wanted = index.get("weight_map")
    names: dict[str, str] = typed(Mapping[str, str], wanted, f"weight_map in {path}")
    for name, file_name in names.items():
        # Nothing outside of the folder.
        if file_name in ("", "..") or Path(file_name).name != file_name or "\0" in file_name:
            raise CheckpointError(f"{path} says that {name!r} is in {file_name!r}: no file's name")
    return names


def _store_error(error: OSError, path: Path) -> StoreError:
    text = f"cannot read: {error.strerror}"
    return StoreError(error.errno, text, str(error.filename or path))


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
