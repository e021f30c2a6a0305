"""A DCP checkpoint's .metadata is a pickle: what DCP writes is read, and nothing else is run."""

from __future__ import annotations

import builtins
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from hetero.checkpoint.dcp.metadata import NAME, read_metadata
from offload.errors import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def save(path: Path, state: dict[str, Any]) -> Metadata:
    """Saves by torch; gives what torch reads."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    found: Metadata = FileSystemReader(path).read_metadata()
    return found


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Metadata]:
    path = tmp_path / "saved"
    return path, save(path, {"model": {"w": torch.ones(3, 2)}, "step": 3})


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_it_is_what_torch_reads(tmp_path: Path, protocol: int) -> None:
    """Of all dtypes, whatever the protocol of the pickle."""
    model: dict[str, Any] = {str(d): torch.ones(3, 0, 2).to(d) for d in DTYPES}
    model |= {"scalar": torch.tensor(1.5), "w": torch.ones(4, 5)}
    path = tmp_path / "saved"
    torch_read = save(path, {"model": model, "list": [{"a": torch.ones(2)}, {"a": 3}], "o": None})
    (path / NAME).write_bytes(pickle.dumps(torch_read, protocol=protocol))
    found = read_metadata(path)
    assert found.state_dict_metadata == torch_read.state_dict_metadata
    assert found.planner_data == torch_read.planner_data
    assert found.storage_data == torch_read.storage_data


class _Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "posix.system"),
        (eval, "builtins.eval"),
        (subprocess.Popen, "subprocess.Popen"),
        (builtins.__import__, "builtins.__import__"),
        (torch.load, "torch.serialization.load"),
        (torch.hub.load, "torch.hub.load"),
        (torch_metadata.torch.Tensor, "torch.Tensor"),
        (pickle.loads, "_pickle.loads"),
    ],
)
def test_a_name_that_dcp_does_not_write_is_refused(
    saved: tuple[Path, Metadata], tmp_path: Path, function: Any, name: str
) -> None:
    """Wherever it stands; what would be called is not."""
    path, _ = saved
    ran = tmp_path / "ran"
    call = _Calls(function, f"touch {ran}")
    for hostile in (call, [call], Metadata({"w": call}), Metadata({}, storage_data={0: call})):
        (path / NAME).write_bytes(pickle.dumps(hostile))
        with pytest.raises(CheckpointError, match=f"names {name}, which DCP does not write"):
            read_metadata(path)
    assert not ran.exists()


def test_names_inside_of_modules_are_refused(saved: tuple[Path, Metadata]) -> None:
    """A dotted name would lead from a module of DCP's to all that it imports."""
    path, _ = saved
    for module, name in [
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch", "os.system"),
        ("pathlib", "os.system"),
    ]:
        text = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
        text += b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
        (path / NAME).write_bytes(text)
        with pytest.raises(CheckpointError, match=f"names {module}.{name}"):
            read_metadata(path)


def test_getattr_reaches_no_attribute(saved: tuple[Path, Metadata], tmp_path: Path) -> None:
    """It stands for an enum's member, and gives its name alone."""
    path, _ = saved
    reach = _Calls(getattr, _Calls(getattr, torch_metadata.Metadata, "__init__"), "__globals__")
    (path / NAME).write_bytes(pickle.dumps(reach))
    with pytest.raises(CheckpointError, match="is not as DCP writes it"):
        read_metadata(path)


def test_torchs_classes_cannot_be_changed(saved: tuple[Path, Metadata]) -> None:
    """A pickle can set attributes of classes that it names: those are stand-ins."""
    path, _ = saved
    before = dict(vars(Metadata))
    module = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (path / NAME).write_bytes(b"\x80\x02" + module + b"N}X\x08\x00\x00\x00__init__K\x01s\x86b.")
    with pytest.raises(CheckpointError):
        read_metadata(path)
    assert dict(vars(Metadata)) == before


def _wrong(metadata: Metadata, what: str) -> None:
    entry: Any = metadata.state_dict_metadata["model.w"]
    place: _StorageInfo = metadata.storage_data[MetadataIndex("model.w", [0, 0])]
    if what == "outside":
        place.relative_path = "../../secret"
    elif what == "absolute":
        place.relative_path = "/etc/passwd"
    elif what == "negative":
        place.offset = -1
    elif what == "transformed":
        place.transform_descriptors = ["stream.zstd"]
    elif what == "larger":
        entry.chunks[0].sizes = torch.Size((4, 2))
    elif what == "smaller":
        entry.chunks[0].sizes = torch.Size((2, 2))
    elif what == "flat":
        entry.chunks[0].offsets = torch.Size((0,))
    elif what == "nowhere":
        del metadata.storage_data[MetadataIndex("model.w", [0, 0])]
    elif what == "no dtype":
        entry.properties.dtype = "float32"
    elif what == "no chunks":
        entry.chunks = []
    elif what == "huge":
        entry.size = torch.Size((2**40, 2**40))
    elif what == "list":
        metadata.state_dict_metadata["model.w"] = []  # type: ignore[assignment]
    elif what == "path":
        metadata.planner_data["model.w"] = ("model", None)
    else:
        raise AssertionError(what)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("outside", "'../../secret' is no file's name"),
        ("absolute", "'/etc/passwd' is no file's name"),
        ("negative", "something is at byte -1"),
        ("transformed", "is transformed by"),
        ("larger", "has a chunk of"),
        ("smaller", "has 6 elements, and its chunks have 4"),
        ("flat", "has a chunk of"),
        ("nowhere", "does not say where 'model.w'"),
        ("no dtype", "has the dtype 'float32'"),
        ("no chunks", "has no list of chunks"),
        ("huge", "which is too large"),
        ("list", "must be a TensorStorageMetadata"),
        ("path", "planner_data has 'model.w'"),
    ],
)
def test_what_contradicts_itself_is_refused(
    saved: tuple[Path, Metadata], what: str, told: str
) -> None:
    path, metadata = saved
    _wrong(metadata, what)
    (path / NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError) as raised:
        read_metadata(path)
    assert told in str(raised.value)


def test_what_was_cut_or_changed_is_an_error(saved: tuple[Path, Metadata]) -> None:
    """No byte of it makes anything else than a CheckpointError, or metadata."""
    path, _ = saved
    content = (path / NAME).read_bytes()
    for end in range(0, len(content), 3):
        (path / NAME).write_bytes(content[:end])
        with pytest.raises(CheckpointError):
            read_metadata(path)
    refused = 0
    for at in range(0, len(content), 2):
        changed = bytearray(content)
        changed[at] ^= 0x15
        (path / NAME).write_bytes(changed)
        try:
            read_metadata(path)
        except CheckpointError:
            refused += 1
    assert refused > len(content) / 8
    (path / NAME).unlink()
    with pytest.raises(CheckpointError, match="is no DCP checkpoint"):
        read_metadata(path)
