"""A DCP checkpoint's .metadata is a pickle: what DCP writes is read, and nothing else is run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from hetero.checkpoint.dcp.metadata import METADATA_NAME as NAME
from hetero.checkpoint.dcp.metadata import read_metadata
from offload.errors import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def save(path: Path, state: dict[str, Any]) -> Metadata:
    """Saves by torch; gives what torch reads."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
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
    assert found.paths == torch_read.planner_data
    places = torch_read.storage_data
    for key, entry in torch_read.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            place = found.objects.pop(key)
            assert vars(places[MetadataIndex(key)]).items() >= vars(place).items()
            continue
        record = found.tensors.pop(key)
        assert (record.shape, record.dtype) == (tuple(entry.size), entry.properties.dtype)
        for chunk, (box, place) in zip(entry.chunks, found.boxes.pop(key), strict=True):
            assert (box.offsets, box.sizes) == (tuple(chunk.offsets), tuple(chunk.sizes))
            stored = places[MetadataIndex(key, chunk.offsets)]
            assert vars(stored).items() >= vars(place).items()
    assert not found.tensors
    assert not found.objects


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
        (torch.load, "torch.serialization.load"),
        (torch_metadata.torch.Tensor, "torch.Tensor"),
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


METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"


def dotted(module: str, name: str) -> bytes:
    """Names an attribute of what a module imports."""
    text = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
    return text + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."


@pytest.mark.parametrize(
    ("content", "told"),
    [
        *(
            (dotted(module, "os.system"), f"names {module}.os.system")
            for module in ("torch", "torch.distributed.checkpoint.filesystem", "pathlib")
        ),
        # getattr() stands for an enum's member, and gives its name alone.
        (
            pickle.dumps(_Calls(getattr, _Calls(getattr, Metadata, "__init__"), "__globals__")),
            "is not as DCP writes it",
        ),
        # A pickle can set attributes of classes that it names: those are stand-ins.
        (
            b"\x80\x02" + METADATA + b"N}X\x08\x00\x00\x00__init__K\x01s\x86b.",
            "gives attributes",
        ),
    ],
)
def test_nothing_is_reached_through_what_may_be_named(
    tmp_path: Path, content: bytes, told: str
) -> None:
    before = dict(vars(Metadata))
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=told):
        read_metadata(tmp_path)
    assert dict(vars(Metadata)) == before


PLACE = MetadataIndex("model.w", [0, 0])


# As many elements as the tensor has, of which two are there twice, and others not at all.
OVERLAPPING = [
    torch_metadata.ChunkStorageMetadata(torch.Size(at), torch.Size((n, 1)))
    for at, n in (((0, 0), 2), ((1, 0), 2), ((0, 1), 1), ((2, 1), 1))
]


def entry_of(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["model.w"]


def place_of(metadata: Metadata) -> _StorageInfo:
    return metadata.storage_data[PLACE]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: vars(place_of(m)).update(relative_path="../../x"), "'../../x' is no file's nam"),
        (lambda m: vars(place_of(m)).update(relative_path="/etc/x"), "'/etc/x' is no file's name"),
        (lambda m: vars(place_of(m)).update(offset=-1), "offset in a place in storage_data is -1"),
        (lambda m: vars(place_of(m)).update(transform_descriptors=["zstd"]), "is transformed by"),
        (lambda m: vars(entry_of(m).chunks[0]).update(sizes=torch.Size((4, 2))), "has a chunk of"),
        (
            lambda m: vars(entry_of(m).chunks[0]).update(sizes=torch.Size((2, 2))),
            "has 6 elements, and its chunks have 4",
        ),
        (lambda m: vars(entry_of(m).chunks[0]).update(offsets=torch.Size((0,))), "has a chunk of"),
        (
            lambda m: entry_of(m).chunks.__setitem__(slice(None), OVERLAPPING),
            "the same elements, o",
        ),
        (lambda m: m.storage_data.pop(PLACE), "does not say where 'model.w'"),
        (lambda m: vars(entry_of(m).properties).update(dtype="float32"), "has the dtype 'float32'"),
        (lambda m: vars(entry_of(m)).update(chunks=[]), "has no list of chunks"),
        (lambda m: vars(entry_of(m)).update(size=torch.Size((2**40, 2**40))), "which no tensor"),
        (lambda m: m.state_dict_metadata.update({"model.w": []}), "'model.w' is [], must be"),
        (lambda m: m.planner_data.update({"model.w": ("model", None)}), "planner_data has 'model"),
    ],
)
def test_what_contradicts_itself_is_refused(
    saved: tuple[Path, Metadata], change: Callable[[Metadata], object], told: str
) -> None:
    path, metadata = saved
    change(metadata)
    (path / NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError) as raised:
        read_metadata(path)
    assert told in str(raised.value)


def test_what_was_cut_or_changed_is_an_error(saved: tuple[Path, Metadata]) -> None:
    """No byte of it makes anything else than a CheckpointError, or metadata."""
    path, _ = saved
    content = (path / NAME).read_bytes()
    for end in range(0, len(content), 9):
        (path / NAME).write_bytes(content[:end])
        with pytest.raises(CheckpointError):
            read_metadata(path)
    refused = 0
    for at in range(0, len(content), 7):
        changed = bytearray(content)
        changed[at] ^= 0x15
        (path / NAME).write_bytes(changed)
        try:
            read_metadata(path)
        except CheckpointError:
            refused += 1
    assert refused > len(content) / 28
    (path / NAME).unlink()
    with pytest.raises(CheckpointError, match="is no DCP checkpoint"):
        read_metadata(path)


# Pickles that ask for more than they are


def limited_read(path: Path, mib: int) -> str:
    """What a process with so much memory beside its modules, and 20 s of a core, says of it."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from hetero.checkpoint.dcp.metadata import read_metadata\n"
        "from offload.errors import CheckpointError\n"
        "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        f"most = pages * resource.getpagesize() + ({mib} << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (used + 20, used + 20))\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        read_metadata(Path(path))\n"
        "        print('read')\n"
        "    except CheckpointError as error:\n"
        "        print(len(str(error)), error)\n"
    )
    folders = sorted(str(each) for each in path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", code, *folders], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def of_dcp(*, size: bytes, key: bytes = b"\x8c\x01k", chunks: bytes = b"]") -> bytes:
    """A pickle of DCP's Metadata with one tensor, whose parts are opcodes."""
    module = b"ctorch.distributed.checkpoint.metadata\n"
    properties = b"}(\x8c\x05dtypectorch\nfloat32\nu"
    tensor = (
        b"(\x8c\x0aproperties" + module + b"TensorProperties\n)\x81" + properties + b"b"
        b"\x8c\x04size" + size + b"\x8c\x06chunks" + chunks + b"u"
    )
    entry = module + b"TensorStorageMetadata\n)\x81}" + tensor + b"b"
    top = b"(\x8c\x13state_dict_metadata}" + key + entry + b"s\x8c\x0cstorage_data}u"
    return b"\x80\x04" + module + b"Metadata\n)\x81}" + top + b"b."


HUGE = b"K\x01" + b"2\x86" * 60  # DUP, TUPLE2: each tuple has the one before twice
PUT_TWICE = b"K\x01" + b"".join(
    b"\x94h" + bytes([i]) + b"\x86" for i in range(60)
)  # MEMOIZE, BINGET, TUPLE2
BOMBS = {
    "memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "memo0": b"\x80\x02Nr\xff\xff\xff\x07.",
    "size": of_dcp(size=PUT_TWICE),
    "size_of": of_dcp(size=b"ctorch\nSize\n" + PUT_TWICE + b"\x85R"),
    "key": of_dcp(size=b")", key=PUT_TWICE),
    "chunks": of_dcp(size=b")", chunks=PUT_TWICE),
    "path": b"\x80\x04cpathlib\nPosixPath\n" + PUT_TWICE + b"\x85R.",
    "layout": b"\x80\x04ctorch.serialization\n_get_layout\n" + PUT_TWICE + b"\x85R.",
    "top": b"\x80\x04" + PUT_TWICE + b".",
    "dup": b"\x80\x04" + HUGE + b".",
    "set": b"\x80\x04\x8f(" + PUT_TWICE + b"\x90.",
    "frozenset": b"\x80\x04(" + PUT_TWICE + b"\x91.",
    "dict": b"\x80\x04(" + PUT_TWICE + b"Nd.",
    "frame": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7fN.",
    "bytearray": b"\x80\x05\x96" + b"\xff" * 6 + b"\x00\x00.",
    "long": b"\x80\x02\x8b" + (1 << 30).to_bytes(4, "little") + b"1.",
    "digits": b"L" + b"9" * 100_000 + b"L\n.",
    "sizes": b"\x80\x04ctorch\nSize\n\x94("
    + b"K\x01" * 50_000
    + b"t\x85\x94"
    + b"h\x00h\x01R" * 10_000
    + b".",
}


@pytest.mark.usefixtures("quick_python")
def test_a_pickle_that_asks_for_more_than_it_is(tmp_path: Path) -> None:
    """Each of these took gigabytes, or more time than there is; all are refused at once."""
    for name, content in BOMBS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / NAME).write_bytes(content)
    lines = limited_read(tmp_path, 200).splitlines()
    assert len(lines) == len(BOMBS)
    assert all(line != "read" and int(line.split()[0]) < 1000 for line in lines)


def test_one_list_of_chunks_for_many_tensors(tmp_path: Path) -> None:
    """The work would be the product of both numbers."""
    state = {f"{i:03}": torch.ones(1) for i in range(2)}
    metadata = save(tmp_path, state)
    entry = metadata.state_dict_metadata["000"]
    entry.chunks *= 2000
    metadata.state_dict_metadata = {str(i): entry for i in range(5_000)}
    (tmp_path / NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="more objects in it than"):
        read_metadata(tmp_path)
