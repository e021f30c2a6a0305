"""Headers of safetensors files against the safetensors package, and against damage."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import hetero
from hetero.checkpoint.safetensors_header import DTYPES, MAX_HEADER_BYTES, encode, read

QUICK = settings(max_examples=60, deadline=None)
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


@QUICK
@given(tensors=TENSORS, metadata=st.none() | st.dictionaries(NAMES, NAMES, max_size=2))
def test_reads_what_the_package_writes(
    folder: Path,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None,
) -> None:
    assume(tensors or metadata is None)  # for which package 0.8 writes what it cannot read
    path = folder / "package.safetensors"
    made = {name: some_tensor(*each, seed=i) for i, (name, each) in enumerate(tensors.items())}
    save_file(made, path, None if metadata is None else dict(metadata))
    assert data_of(path) == {
        name: (t.dtype, tuple(t.shape), bytes_of(t)) for name, t in made.items()
    }
    header = read(path)
    assert header.metadata == dict(metadata or {})
    assert header.file_bytes == path.stat().st_size
    assert [e.begin for e in header.entries.values()] == sorted(
        e.begin for e in header.entries.values()
    )


@QUICK
@given(
    tensors=TENSORS,
    metadata=st.none() | st.dictionaries(NAMES, NAMES, max_size=2),
    alignment=st.sampled_from([1, 8, 64, 4096]),
)
def test_the_package_reads_what_this_writes(
    folder: Path,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None,
    alignment: int,
) -> None:
    made = {name: some_tensor(*each, seed=i) for i, (name, each) in enumerate(tensors.items())}
    begin, header = encode(
        [(name, t.dtype, tuple(t.shape)) for name, t in made.items()], metadata, alignment
    )
    path = folder / "own.safetensors"
    path.write_bytes(begin + b"".join(bytes_of(t) for t in made.values()))
    assert package_data_of(path) == {
        name: (t.dtype, tuple(t.shape), bytes_of(t)) for name, t in made.items()
    }
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == (None if metadata is None else dict(metadata))
    assert read(path) == header
    assert list(read(path).entries) == list(tensors)  # (equal dictionaries may differ in order)
    assert header.data_offset == len(begin)
    assert len(begin) % alignment == 0


def test_what_the_format_cannot_say_is_refused() -> None:
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
    refused("the header of 1 tensors has", ("a" * MAX_HEADER_BYTES, torch.int8, ()))


ENTRY: dict[str, Any] = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": ENTRY | changes}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (b"", "no JSON"),
        (b"\xff{}", "codec can't decode"),
        (b"{}\xc3", "codec can't decode"),
        (b'\xef\xbb\xbf{"a": 1}', "JSON"),
        (b"{} x", "no JSON"),
        (b"[" * 9_000, "no JSON: maximum recursion"),
        (b"[" * 100_000, "100000 lists and objects"),
        ([], r"is \[\], must be an object"),
        (1, "is 1, must be an object"),
        (b"NaN", "has the number NaN"),
        (b"-0", "is -0.0, must be an object"),
        (b'{"a": {}, "a": {}}', "the key 'a' twice"),
        (b'{"a": {"dtype": "U8", "dtype": "U8"}}', "the key 'dtype' twice"),
        ({"a": None}, "tensor 'a' of .* is None, must be an object"),
        ({"a": [ENTRY]}, "tensor 'a' of .* must be an object"),
        ({"a": {"dtype": "U8", "shape": [2]}}, "tensor 'a' of .* lacks 'data_offsets'"),
        (b'{"\\ud800": {}}', "surrogates not allowed"),
        ({"__metadata__": None}, "__metadata__ of .* is None, must be an object"),
        ({"__metadata__": {"a": 1}}, "'a' of __metadata__ of .* is 1, must be a string"),
        (b'{"__metadata__": {"a": NaN}}', "has the number NaN"),
        (b'{"__metadata__": {"a": "\\udfff"}}', "surrogates not allowed"),
        (entry(dtype="U9"), "the dtype 'U9'; these are known: BOOL"),
        (entry(dtype=8), "dtype in tensor 'a' of .* is 8, must be a string"),
        (entry(dtype=["U8"]), "must be a string"),
        (entry(shape=2), "shape in tensor 'a' of .* is 2, must be a list"),
        (entry(shape={"0": 2}), "must be a list"),
        (
            entry(shape=[True, 2]),
            "item 0 of shape in tensor 'a' .* is True, must be a",
        ),
        (entry(shape=["2"]), "must be a whole number"),
        (entry(shape=[-2]), "is -2, must be 0 to"),
        (entry(shape=[2.0]), "must be a whole number"),
        (entry(shape=[10**30]), "must be 0 to"),
        (
            b'{"a": {"dtype": "U8", "shape": [%s], "data_offsets": [0, 2]}}' % (b"9" * 5000),
            "no JSON",
        ),
        (
            b'{"a": {"dtype": "U8", "shape": [1e999999999999999999999], "data_offsets": []}}',
            "whole number",
        ),
        (entry(shape=[2**62, 4]), "more than 2"),
        (entry(shape=[2**33, 2**33, 0], data_offsets=[0, 0]), "more than 2"),
        (entry(shape=[2**60] * 100_000), "more than 2"),
        (entry(dtype="U64", shape=[2**61]), "more than 2"),
        (entry(data_offsets=[0]), "has 2 bytes, and its data_offsets are"),
        (entry(data_offsets=[0, 1, 2]), "its data_offsets are"),
        (entry(data_offsets="02"), "must be a list"),
        (entry(data_offsets=[False, 2]), "whole number"),
        (entry(data_offsets=[-2, 0]), "must be 0 to"),
        (entry(data_offsets=[0, 2**64]), "must be 0 to"),
        (entry(data_offsets=[2, 0]), r"has 2 bytes, and its data_offsets are \(2, 0\)"),
        (entry(shape=[3]), r"has 3 bytes, and its data_offsets are \(0, 2\)"),
        (entry(dtype="U16"), "dtype U16 has 4 bytes, and its data_offsets are"),
        (entry(data_offsets=[1, 3]), "tensor 'a' begins at byte 1 of the data and leaves a hole"),
        (entry() | {"b": ENTRY}, "tensor 'b' begins at byte 0 of the data and overlaps with"),
        (
            entry() | {"b": ENTRY | {"data_offsets": [1, 3]}},
            "tensor 'b' begins at byte 1 of the data and overlaps with tensor 'a', which ends at",
        ),
        (entry(shape=[3], data_offsets=[0, 3]), "is cut off: its tensors have 3 bytes of data"),
        (entry(shape=[1], data_offsets=[0, 1]), "bytes that belong to no tensor.*1 bytes.*and 2"),
        ({}, "bytes that belong to no tensor"),
    ],
)
def test_a_wrong_header_is_an_error(tmp_path: Path, fields: Any, message: str) -> None:
    path = write(tmp_path / "wrong.safetensors", fields, b"xy")
    with pytest.raises(hetero.CheckpointError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"1234567", "has 7 bytes"),
        ((3).to_bytes(8, "little") + b"{}", "header ends at byte 11, and the file has 10 bytes"),
        (b"\xff" * 8 + b"{}", "says that its header has 18446744073709551615 bytes"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "says that its header has 100000001 bytes"),
    ],
)
def test_a_wrong_length_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "wrong.safetensors"
    path.write_bytes(content)
    with pytest.raises(hetero.CheckpointError, match=message):
        read(path)


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(hetero.CheckpointError, match="not a regular file"):
        read(tmp_path / "pipe")
    with pytest.raises(hetero.CheckpointError, match="not a regular file"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")


def test_nothing_but_the_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data of a terabyte is not looked at, and a file that shrinks meanwhile is an error."""
    begin, header = encode([("a", torch.int8, (2**40,))])
    path = tmp_path / "large.safetensors"
    path.write_bytes(begin)
    os.truncate(path, header.file_bytes)  # a hole
    calls = []
    pread = os.pread

    def counted(descriptor: int, nbytes: int, offset: int) -> bytes:
        calls.append((offset, nbytes))
        return pread(descriptor, nbytes, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert read(path) == header
    assert calls == [(0, 8), (8, len(begin) - 8)]
    monkeypatch.setattr(os, "pread", lambda descriptor, nbytes, offset: b"")
    with pytest.raises(hetero.CheckpointError, match="ended at byte 0"):
        read(path)


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """`whole` with a few bytes of its beginning flipped, cut, inserted or repeated."""
    content = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(max(len(content), 1))
        match rng.randrange(5):
            case 0 if content:
                content[at % len(content)] ^= 1 << rng.randrange(8)
            case 1:
                del content[at:]
            case 2:
                content[at:at] = rng.choice([b"0", b"9", b",", b"[", b'"', b"\\u0000", b" ", b"-"])
            case 3:
                del content[at : at + rng.randint(1, 4)]
            case _:
                content[at:at] = content[at : at + rng.randint(1, 30)]
        # In half of the cases the length is put right again, to come to what is behind it.
        end = content.rfind(b"}") + 1
        if rng.random() < 0.5 and end > 8:
            content[:8] = (end - 8).to_bytes(8, "little")
    return bytes(content)


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_header_is_read_as_the_package_does_or_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    begin, _ = encode(
        [
            ("w.ä", torch.float32, (2, 3)),
            ("b", torch.bfloat16, (3,)),
            ("empty", torch.int64, (0, 7)),
            ("step", torch.int64, ()),
        ],
        {"format": "pt"},
    )
    whole = begin + bytes(range(38))
    path = tmp_path / "damaged.safetensors"
    outcomes = {"same": 0, "refused": 0}
    for _ in range(1500):
        path.write_bytes(damaged(whole, rng))
        try:
            found = data_of(path)
        except hetero.CheckpointError:
            outcomes["refused"] += 1
            continue
        assert found == package_data_of(path)
        outcomes["same"] += 1
    assert min(outcomes.values()) > 5, outcomes  # both cases are met


def test_the_package_refuses_damage_that_is_refused_here(tmp_path: Path) -> None:
    """Not too strict: of one flipped byte only what this page lists is refused here alone."""
    begin, _ = encode([("a", torch.float32, (2,)), ("b", torch.float32, (2,))], {"format": "pt"})
    whole = begin + bytes(16)
    path = tmp_path / "damaged.safetensors"
    for at in range(len(begin)):
        for bit in range(8):
            content = bytearray(whole)
            content[at] ^= 1 << bit
            path.write_bytes(content)
            try:
                read(path)
            except hetero.CheckpointError as refusal:
                # Key `a` that has become another one's: the package takes the last of the two.
                if "twice" not in str(refusal):
                    with pytest.raises(SafetensorError):
                        load_file(path)
