"""Data files: read by the package safetensors and by HeteroCheckpoint, and all damage is found."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.checkpoint import data_writer, hetero_checkpoint, piece_reader
from hetero.checkpoint.data_writer import CHECKSUMS, PADDING, DataWriter, WrittenFile
from hetero.checkpoint.hetero_checkpoint import HeteroCheckpoint
from hetero.checkpoint.manifest import NAME, Manifest, TensorRecord
from hetero.checkpoint.safetensors_header import DTYPES, encode
from hetero.checkpoint.safetensors_header import read as read_header
from offload._native import Arena, crc32c
from offload.errors import CheckpointError, StoreError

pytestmark = pytest.mark.usefixtures("nothing_left")

PAGE = 4096
BUFFER = 4 * PAGE  # so that small tensors take several


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_writer, "_BUFFER_BYTES", BUFFER)


def crc_of(content: bytes) -> int:
    memory = torch.frombuffer(bytearray(content) or bytearray(1), dtype=torch.uint8)
    return crc32c(memory.data_ptr(), len(content))


def noise(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (numel * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    like = (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    return like and torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


Pieces = list[tuple[str, int, int]]  # key, begin, end


def write_file(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    regions: list[Pieces],
    order: list[int] | None = None,
    io_engine: str = "threads",
) -> WrittenFile:
    """The pieces in regions, which are written in `order`."""
    dtypes = {key: tensor.dtype for key, tensor in tensors.items()}
    writer = DataWriter(path, regions, dtypes, io_engine)
    try:
        for number in order or range(len(regions)):
            for key, begin, end in regions[number]:
                writer.write(key, begin, tensors[key][begin:end])
        return writer.finish()
    finally:
        writer.close()


def records(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorRecord]:
    return {key: TensorRecord(tuple(t.shape), t.dtype) for key, t in tensors.items()}


def opened(
    folder: Path,
    files: Mapping[str, WrittenFile],
    tensors: Mapping[str, TensorRecord],
    engine: str = "threads",
) -> HeteroCheckpoint:
    """The checkpoint of these files. Raises CheckpointError."""
    manifest = Manifest(0, files, tensors, {}, (), (), None, ())
    (folder / NAME).write_bytes(manifest.to_json())
    made = HeteroCheckpoint(folder, engine)
    made.open()
    return made


@dataclasses.dataclass
class Sample:
    """Tensors, which pieces of them are in which region of which file, and the files."""

    tensors: dict[str, torch.Tensor]
    files: dict[str, list[Pieces]]


NUMELS = st.one_of(st.integers(0, 40), st.integers(0, 3 * BUFFER), st.just(BUFFER))


@st.composite
def samples(draw: Any) -> Sample:
    tensors, pieces = {}, []
    for number in range(draw(st.integers(1, 6))):
        key = f"model/{number}@x"
        numel = draw(NUMELS)
        dtype = draw(st.sampled_from(sorted(DTYPES.values(), key=str)))
        tensors[key] = noise(numel, dtype, number)
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=4))})
        if numel == 0:
            pieces += [(key, 0, 0)] if draw(st.booleans()) else []
        pieces += [(key, a, b) for a, b in itertools.pairwise(cuts)]
    pieces = draw(st.permutations(pieces))
    files: dict[str, list[Pieces]] = {f"f{i}": [] for i in range(draw(st.integers(1, 3)))}
    for regions in files.values():
        regions += [[] for _ in range(draw(st.integers(1, 3)))]
    for piece in pieces:
        draw(st.sampled_from(draw(st.sampled_from(list(files.values()))))).append(piece)
    return Sample(tensors, files)


ENGINES = ["threads", "auto"]


def run_sample(folder: Path, sample: Sample, data: Any) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tensors, engine = sample.tensors, data.draw(st.sampled_from(ENGINES))
    written = {}
    for name, regions in sample.files.items():
        order = data.draw(st.permutations(range(len(regions))))
        written[name] = write_file(folder / name, tensors, regions, order, engine)
        assert written[name].nbytes == (folder / name).stat().st_size
        with safetensors.safe_open(folder / name, "pt") as found:
            wanted = {f"{key}@{begin}": (key, begin, end) for r in regions for key, begin, end in r}
            padding = {k for k in found.keys() if k.startswith(PADDING)}  # noqa: SIM118
            assert set(found.keys()) == {*wanted, *padding}
            assert not any(found.get_tensor(name).any() for name in padding)
            for entry_name, (key, begin, end) in wanted.items():
                assert same(found.get_tensor(entry_name), tensors[key][begin:end])
    ranges = []
    for key, tensor in tensors.items():
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
        ranges += [(key, 0, tensor.numel()), (key, begin, end)]
    reader = opened(folder, written, records(tensors), engine)
    try:
        for order in data.draw(st.permutations(ranges)), ranges:
            values = reader.values([order[:1], order[1:]])
            for (key, begin, end), found in zip(order, values, strict=True):
                assert found[:2] == (key, begin)
                assert same(found[2], tensors[key][begin:end])
        for key, begin, end in data.draw(st.permutations(ranges)):
            assert same(reader.read(key, begin, end), tensors[key][begin:end])
    finally:
        reader.close()
        reader.close()
    reader = opened(folder, written, records(tensors), engine)
    try:
        all_bytes = sum(t.numel() * t.itemsize for t in tensors.values())
        assert sum(nbytes for nbytes, error in reader.verify() if error is None) == all_bytes
    finally:
        reader.close()


@given(samples(), st.data())
def test_what_is_written_is_read(tmp_path: Path, sample: Sample, data: Any) -> None:
    run_sample(tmp_path / "files", sample, data)


TENSORS = {
    "model/a": noise(3000, torch.float32, 1),
    "model/b": noise(999, torch.bfloat16, 2),
    "model/c": noise(1, torch.int64, 3),
    "model/empty": noise(0, torch.float16, 4),
}
REGIONS: list[Pieces] = [
    [("model/a", 0, 1000), ("model/b", 0, 999)],
    [("model/a", 1000, 3000), ("model/empty", 0, 0), ("model/c", 0, 1)],
]


@pytest.fixture
def written(tmp_path: Path) -> WrittenFile:
    return write_file(tmp_path / "f", TENSORS, REGIONS)


def read_all(folder: Path, files: Mapping[str, WrittenFile]) -> None:
    """Raises CheckpointError, or all values are right."""
    reader = opened(folder, files, records(TENSORS))
    try:
        for key, tensor in TENSORS.items():
            assert same(reader.whole(key), tensor)
        for _, error in reader.verify():
            if error is not None:
                raise error
    finally:
        reader.close()


def refused(folder: Path, files: Mapping[str, WrittenFile], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_all(folder, files)


def test_regions_without_entries(tmp_path: Path) -> None:
    made = write_file(tmp_path / "f", TENSORS, [[], [], *REGIONS, []])
    read_all(tmp_path, {"f": made})
    made = write_file(tmp_path / "none", {}, [[]])
    opened(tmp_path, {"none": made}, {}).close()


def test_every_kind_of_byte_that_flips(written: WrittenFile, tmp_path: Path) -> None:
    """In the header and in entries it is found; in padding it does no harm."""
    path = tmp_path / "f"
    content = path.read_bytes()
    header = read_header(path)
    padding = [e for e in header.entries.values() if e.name.startswith(PADDING)]
    assert len(padding) == 2
    harmless = {
        header.data_offset + at for entry in padding for at in range(entry.begin, entry.end)
    }
    used = {0, 7, 8, 9, *range(10, 600, 7), header.data_offset - 1}
    for entry in header.entries.values():
        begin, end = header.data_offset + entry.begin, header.data_offset + entry.end
        used |= {begin, begin + 1, (begin + end) // 2, end - 1} if end > begin else set()
    generator = random.Random(1)
    used |= {generator.randrange(len(content)) for _ in range(60)}
    for at in sorted(used):
        flipped = bytearray(content)
        flipped[at] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        if at in harmless:
            read_all(tmp_path, {"f": written})
        else:
            refused(tmp_path, {"f": written}, "is damaged|are damaged")


def test_truncations_and_more_bytes(written: WrittenFile, tmp_path: Path) -> None:
    path = tmp_path / "f"
    content = path.read_bytes()
    lengths = {0, 1, 7, 8, 9, len(content) - 1, len(content) + 1, len(content) + PAGE}
    for length in lengths | set(range(0, len(content), 1024)):
        path.write_bytes(content[:length].ljust(length, b"\0"))
        refused(tmp_path, {"f": written}, f"has {length} bytes, and the checkpoint was written")
        # With the manifest's number wrong, too, it is the header that says otherwise.
        claimed = dataclasses.replace(written, nbytes=length)
        with pytest.raises(CheckpointError):
            read_all(tmp_path, {"f": claimed})


def test_a_file_of_another_checkpoint_or_none(written: WrittenFile, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.unlink()
    refused(tmp_path, {"f": written}, "f cannot be read: No such file")
    other = {**TENSORS, "model/a": TENSORS["model/a"] + 1}
    write_file(path, other, REGIONS)
    refused(tmp_path, {"f": written}, "f is damaged: the checksum of its header is another one")
    path.unlink()
    path.mkdir()
    refused(tmp_path, {"f": written}, "f is not a regular file")
    path.rmdir()
    os.mkfifo(path)
    refused(tmp_path, {"f": written}, "f is not a regular file")
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(tmp_path, {"f": written}, "f is not a regular file")
    path.unlink()
    path.symlink_to(path)
    refused(tmp_path, {"f": written}, "f cannot be read: Too many levels of symbolic links")


def test_a_link_to_the_file_is_followed(written: WrittenFile, tmp_path: Path) -> None:
    """Some stores keep files under other names."""
    os.rename(tmp_path / "f", tmp_path / "blob")
    (tmp_path / "f").symlink_to("blob")
    read_all(tmp_path, {"f": written})


def by_hand(
    path: Path, entries: list[tuple[str, torch.Tensor]], checksums: str | None = None
) -> WrittenFile:
    """A file with right checksums of whatever entries."""
    contents = [bytes(t.reshape(-1).view(torch.uint8).tolist()) for _, t in entries]
    padding = -sum(map(len, contents)) % PAGE
    described = [(name, t.dtype, tuple(t.shape)) for name, t in entries]
    if padding:
        described.append((f"{PADDING}0", torch.uint8, (padding,)))
        contents.append(bytes(padding))
    crcs = "".join(f"{crc_of(content):08x}" for content in contents)
    head, _ = encode(described, {CHECKSUMS: crcs if checksums is None else checksums}, PAGE)
    path.write_bytes(head + b"".join(contents))
    return WrittenFile(path.stat().st_size, len(head), crc_of(head))


A = torch.arange(10.0)
WHOLE = {"a": TensorRecord((10,), torch.float32)}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("a@0", A[:4]), ("a@5", A[5:])], "elements 4 to 5 of 'a' are missing"),
        ([("a@0", A[:6]), ("a@5", A[5:])], "elements 5 to 6 of 'a' are there twice"),
        ([("a@0", A), ("a@00", A)], "elements 0 to 10 of 'a' are there twice"),
        ([("a@0", A[:9])], "has 9 elements of 'a', and the manifest says 10"),
        ([("a@1", A[1:])], "elements 0 to 1 of 'a' are missing"),
        ([("a@0", torch.arange(11.0))], "has 11 elements of 'a', and the manifest says 10"),
        ([], "has 0 elements of 'a', and the manifest says 10"),
        ([("a@0", A.bfloat16())], "has 'a@0' of torch.bfloat16 .* the manifest says torch.float32"),
        ([("a@0", A.int())], "has 'a@0' of torch.int32"),
        ([("a@0", A.view(2, 5))], r"has 'a@0' of torch.float32 and shape \(2, 5\)"),
        ([("a@0", A), ("b@0", A)], "has 'b@0', of which the manifest knows not"),
        ([("a@", A)], "has 'a@', of which the manifest knows not"),
        ([("a@-1", A)], "has 'a@-1', of which the manifest knows not"),
        ([("a@\u0660", A)], "of which the manifest knows not"),
        ([("a@" + "0" * 5000, A)], "of which the manifest knows not"),
        ([("a@" + "9" * 5000, A)], "of which the manifest knows not"),
        ([("a", A)], "has 'a', of which the manifest knows not"),
    ],
)
def test_files_made_by_hand(
    entries: list[tuple[str, torch.Tensor]], message: str, tmp_path: Path
) -> None:
    made = by_hand(tmp_path / "f", entries)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, {"f": made}, WHOLE).close()


def test_empty_entries_between_others_do_no_harm(tmp_path: Path) -> None:
    """Wherever they say that they are."""
    entries = [("a@0", A[:4]), ("a@2", A[:0]), ("a@9", A[:0]), ("a@4", A[4:]), ("a@7", A[:0])]
    made = by_hand(tmp_path / "f", entries)
    for begin in range(10):
        reader = opened(tmp_path, {"f": made}, WHOLE)
        assert same(reader.read("a", begin, 10), A[begin:])
        assert same(reader.read("a", 0, begin), A[:begin])
        reader.close()


@pytest.mark.parametrize("checksums", ["", "0" * 15, "0" * 17, "g" * 16, "A" * 16])
def test_checksums_that_are_none(checksums: str, tmp_path: Path) -> None:
    made = by_hand(tmp_path / "f", [("a@0", A)], checksums)
    with pytest.raises(CheckpointError, match="f has no checksum of each tensor in its header"):
        opened(tmp_path, {"f": made}, WHOLE).close()


@pytest.mark.parametrize("claimed", [0, 8, 100, 4095, 8192])
def test_headers_of_another_length_than_the_manifest_says(claimed: int, tmp_path: Path) -> None:
    """Else a part of the header would have no checksum."""
    made = by_hand(tmp_path / "f", [("a@0", A)])
    head = (tmp_path / "f").read_bytes()[:claimed]
    made = dataclasses.replace(made, header_nbytes=claimed, header_crc32c=crc_of(head))
    with pytest.raises(CheckpointError, match="f has a header of 4096 bytes, and the checkpoint"):
        opened(tmp_path, {"f": made}, WHOLE).close()


@pytest.fixture
def sparse(tmp_path: Path) -> Iterator[WrittenFile]:
    """A file that claims 32 GiB, of which the disk has a page."""
    with (tmp_path / "f").open("wb") as stream:
        stream.truncate(32 << 30)
    yield WrittenFile(32 << 30, 32 << 30, 0)
    (tmp_path / "f").unlink()


def test_a_header_that_claims_much_is_not_read(
    sparse: WrittenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hetero_checkpoint, "MAX_HEADER_BYTES", 4 * PAGE)
    seen = []
    monkeypatch.setattr(hetero_checkpoint, "crc_of", lambda head: seen.append(len(head)) or 1)
    with pytest.raises(CheckpointError, match="f is damaged: the checksum of its header"):
        opened(tmp_path, {"f": sparse}, WHOLE).close()
    assert max(seen, default=0) <= 8 * PAGE


def test_large_pieces_take_no_large_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not asked for takes no memory, however large its piece is."""
    numel = 32 << 30
    described = [("a@0", torch.float32, (10,)), ("pad@0", torch.uint8, (PAGE - 40,))]
    described.append(("large@0", torch.uint8, (numel,)))
    crcs = [crc_of(bytes(A.view(torch.uint8).tolist())), 0, 0]
    head, header = encode(described, {CHECKSUMS: "".join(f"{c:08x}" for c in crcs)}, PAGE)
    with (tmp_path / "f").open("wb") as stream:
        stream.write(head + bytes(A.view(torch.uint8).tolist()))
        stream.truncate(header.file_bytes)
    tensors = {
        **WHOLE,
        "pad": TensorRecord((PAGE - 40,), torch.uint8),
        "large": TensorRecord((numel,), torch.uint8),
    }
    made = WrittenFile(header.file_bytes, len(head), crc_of(head))
    buffers = []

    def arena(nbytes: int) -> Arena:
        buffers.append(nbytes)
        return Arena(nbytes)

    monkeypatch.setattr(piece_reader, "Arena", arena)
    reader = opened(tmp_path, {"f": made}, tensors)
    assert same(reader.whole("a"), A)
    assert buffers == [PAGE]
    reader.close()


def test_errors_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(StoreError, match="there"):
        write_file(tmp_path / "there", TENSORS, REGIONS)
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(StoreError, match="nowhere/f"):
        write_file(tmp_path / "nowhere" / "f", TENSORS, REGIONS)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreError, match="cannot reserve .* free.*No space left.*full"):
            write_file(tmp_path / "full", TENSORS, REGIONS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="fsync: No space left.*unsynced"):
            write_file(tmp_path / "unsynced", TENSORS, REGIONS)


def test_a_filesystem_without_direct_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a one makes the file before it refuses O_DIRECT."""
    real, refused_flags = os.open, []

    def refusing(path: Any, flags: int, *mode: int) -> int:
        descriptor = real(path, flags & ~os.O_DIRECT, *mode)
        if flags & os.O_DIRECT:
            os.close(descriptor)
            refused_flags.append(flags)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return descriptor

    monkeypatch.setattr(os, "open", refusing)
    written = write_file(tmp_path / "f", TENSORS, REGIONS)
    read_all(tmp_path, {"f": written})
    assert [flags & os.O_CREAT != 0 for flags in refused_flags] == [True, False]
    with pytest.raises(StoreError, match="File exists"):
        write_file(tmp_path / "f", TENSORS, REGIONS)
    read_all(tmp_path, {"f": written})
