"""Headers of safetensors files against the safetensors package, and against damage."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hetero
from hetero.checkpoint import safetensors_header
from hetero.checkpoint.safetensors_header import DTYPES, MAX_HEADER_BYTES, encode, read

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=6)


def some_tensor(dtype_name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of any dtype, of random bytes that are values of it."""
    dtype = DTYPES[dtype_name]
    numel = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def data_of(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """What our header finds in a file."""
    header, whole = read(path), path.read_bytes()
    data = whole[header.data_offset :]
    return {e.name: (e.dtype, e.shape, data[e.begin : e.end]) for e in header.entries.values()}


def package_data_of(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """What the package finds in it."""
    found = load_file(path)
    return {name: (t.dtype, tuple(t.shape), bytes_of(t)) for name, t in found.items()}


def write(path: Path, fields: Any, data: bytes = b"") -> Path:
    """A file with this header, whatever it is: text, bytes, or something that JSON can write."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


@given(
    tensors=TENSORS,
    metadata=st.none() | st.dictionaries(NAMES, NAMES, max_size=2),
    alignment=st.sampled_from([1, 8, 64, 4096]),
)
def test_the_package_reads_what_this_writes_and_the_other_way_round(
    folder: Path,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None,
    alignment: int,
) -> None:
    made = {name: some_tensor(*each, seed=i) for i, (name, each) in enumerate(tensors.items())}
    wanted = {name: (t.dtype, tuple(t.shape), bytes_of(t)) for name, t in made.items()}
    begin, header = encode(
        [(name, t.dtype, tuple(t.shape)) for name, t in made.items()], metadata, alignment
    )
    path = folder / "own.safetensors"
    path.write_bytes(begin + b"".join(bytes_of(t) for t in made.values()))
    assert package_data_of(path) == wanted
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == (None if metadata is None else dict(metadata))
    assert read(path) == header
    # (Equal dictionaries may differ in order, as those without elements do here.)
    found = [name for name in read(path).entries if made[name].numel()]
    assert found == [name for name in tensors if made[name].numel()]
    assert header.data_offset == len(begin)
    assert len(begin) % alignment == 0

    if not tensors and metadata is not None:
        return  # for which package 0.8 writes what it cannot read
    path = folder / "package.safetensors"
    save_file(made, path, None if metadata is None else dict(metadata))
    assert data_of(path) == wanted
    header = read(path)
    assert header.metadata == dict(metadata or {})
    assert header.file_bytes == path.stat().st_size
    begins = [e.begin for e in header.entries.values()]
    assert begins == sorted(begins)


def test_what_the_format_cannot_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 10_000)

    def refused(message: str, *tensors: tuple[str, torch.dtype, tuple[int, ...]]) -> None:
        with pytest.raises(ValueError, match=message):
            encode(tensors)

    refused("'a' is taken", ("a", torch.int8, ()), ("a", torch.int8, ()))
    refused("is taken", ("__metadata__", torch.int8, ()))
    refused("no torch.complex128", ("a", torch.complex128, ()))
    refused("no list of sizes", ("a", torch.int8, (-1,)))
    refused("no list of sizes", ("a", torch.int8, (True,)))
    refused("more than 2", ("a", torch.int8, (2**40, 2**40)))
    refused("not Unicode", ("\ud800", torch.int8, ()))
    refused("the header of 1 tensors has", ("a" * 10_000, torch.int8, ()))


ENTRY: dict[str, Any] = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": ENTRY | changes}


@pytest.mark.parametrize(
    "fields",
    [
        *(b"", b"\xff{}", b"{} x", b"[" * 100_000, [], 1, b"NaN", {"a": None}, {"a": [ENTRY]}),
        *({"a": {"dtype": "U8", "shape": [2]}}, b'{"\\ud800": {}}', {"__metadata__": {"a": 1}}),
        *(entry(dtype="U9"), entry(dtype="F4", shape=[4]), entry(shape=2), entry(shape=[-2])),
        *(entry(shape=[10**30]), entry(shape=[2**62, 4]), entry(shape=[2**60] * 100_000)),
        entry(shape=[0, 2**33, 2**33], data_offsets=[0, 0]),
        *(entry(data_offsets=[0]), entry(data_offsets=[2, 0]), entry(shape=[3])),
        *(entry(data_offsets=[1, 3]), entry() | {"b": ENTRY}, {}),
        *(entry(shape=[3], data_offsets=[0, 3]), entry(shape=[1], data_offsets=[0, 1])),
    ],
)
def test_a_wrong_header_is_an_error(tmp_path: Path, fields: Any) -> None:
    path = write(tmp_path / "wrong.safetensors", fields, b"xy")
    with pytest.raises(hetero.CheckpointError, match="is no whole safetensors file") as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"1234567", (3).to_bytes(8, "little") + b"{}", b"\xff" * 8 + b"{}"),
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little"),
    ],
)
def test_a_wrong_length_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wrong.safetensors"
    path.write_bytes(content)
    with pytest.raises(hetero.CheckpointError, match="is no whole safetensors file"):
        read(path)


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(hetero.CheckpointError, match="not a regular file"):
        read(tmp_path / "pipe")
    with pytest.raises(hetero.CheckpointError, match="not a regular file"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")


def test_nothing_but_the_header_is_read(tmp_path: Path) -> None:
    """The data of a terabyte is not looked at."""
    begin, header = encode([("a", torch.int8, (2**40,))])
    path = tmp_path / "large.safetensors"
    path.write_bytes(begin)
    os.truncate(path, header.file_bytes)  # a hole
    assert read(path) == header
