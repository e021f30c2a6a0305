"""native/checksum: CRC-32C by instruction and by tables against polynomial division."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from offload import _native

STREAM = 256  # kStreamBytes of native/checksum/crc32c.cpp
BORDERS = [blocks * 3 * STREAM for blocks in (1, 2, 5)] + [1 << 16]
EMPTY = 0  # the checksum of no bytes


@pytest.fixture(autouse=True, params=[_native.isa_available()[0], "scalar"])
def isa(request: pytest.FixtureRequest) -> None:
    """By the processor's instruction, where it has one, and by tables."""
    _native.set_isa(request.param)


def address_of(buffer: bytes) -> int:
    address = ctypes.cast(ctypes.c_char_p(buffer), ctypes.c_void_p).value
    assert address is not None
    return address


def crc32c(data: bytes, crc: int = EMPTY) -> int:
    return _native.crc32c(address_of(data), len(data), crc)


def of_every_prefix(data: bytes) -> list[int]:
    """The checksums of data[:0], data[:1], ..., data, by the definition."""
    remainder, found = 0xFFFFFFFF, [EMPTY]
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = (remainder >> 1) ^ (0x82F63B78 if remainder & 1 else 0)
        found.append(remainder ^ 0xFFFFFFFF)
    return found


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator).tolist())


# RFC 3720, B.4: numbers of the bytes as they are sent, the least significant one first.
VECTORS = {
    "zeros": (bytes(32), "aa 36 91 8a"),
    "ones": (b"\xff" * 32, "43 ab a8 62"),
    "incrementing": (bytes(range(32)), "4e 79 dd 46"),
    "decrementing": (bytes(range(31, -1, -1)), "5c db 3f 11"),
    "an iSCSI read command": (
        bytes.fromhex(
            "01c00000 00000000 00000000 00000000 14000000 00000400"
            "00000014 00000018 28000000 00000000 02000000 00000000"
        ),
        "56 3a 96 d9",
    ),
}


def test_known_checksums() -> None:
    """Those of the RFC, what lists of checksums give for the nine digits, and that of no bytes."""
    for name, (data, sent) in VECTORS.items():
        assert crc32c(data).to_bytes(4, "little").hex(" ") == sent, name
    assert crc32c(b"123456789") == 0xE3069283
    assert _native.crc32c(0, 0) == EMPTY
    assert _native.crc32c(0, 0, 0xE3069283) == 0xE3069283


def test_every_length_at_every_alignment() -> None:
    data = random_bytes(16 + 300)
    begin = address_of(data)
    for offset in range(16):
        for nbytes, expected in enumerate(of_every_prefix(data[offset : offset + 300])):
            found = _native.crc32c(begin + offset, nbytes)
            assert found == expected, (offset, nbytes)


def test_lengths_around_the_borders_of_streams() -> None:
    data = random_bytes(6 * STREAM + 16)
    begin = address_of(data)
    expected = of_every_prefix(data)
    for border in range(0, 6 * STREAM + 1, STREAM):
        for nbytes in range(max(border - 16, 0), border + 17):
            assert _native.crc32c(begin, nbytes) == expected[nbytes], nbytes


def test_large_buffers_have_the_checksum_of_their_parts() -> None:
    for border in BORDERS:
        data = random_bytes(border + 24, seed=border)
        begin = address_of(data)
        lengths = (border - 9, border - 8, border - 1, border, border + 1, border + 8)
        for offset, nbytes in itertools.product((0, 1, 7), lengths):
            by_parts = 7
            for at in range(0, nbytes, 200):  # shorter than three streams
                part = min(200, nbytes - at)
                by_parts = _native.crc32c(begin + offset + at, part, by_parts)
            assert _native.crc32c(begin + offset, nbytes, 7) == by_parts, (offset, nbytes)


@pytest.fixture
def island() -> Iterator[tuple[int, int]]:
    """(address, bytes) of pages with neighbours that end a process that reads them."""
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 3 * page) as memory:
        memory[page : 2 * page] = random_bytes(page)
        keep = ctypes.c_char.from_buffer(memory)
        begin = ctypes.addressof(keep)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for at in (begin, begin + 2 * page):
            assert protect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0) == 0
        yield begin + page, page
        del keep


def test_no_byte_beside_the_data_is_read(island: tuple[int, int]) -> None:
    begin, page = island
    data = ctypes.string_at(begin, page)
    for nbytes in [*range(40), 3 * STREAM - 1, 3 * STREAM, 3 * STREAM + 9, page]:
        for at in (0, page - nbytes):
            found = _native.crc32c(begin + at, nbytes)
            assert found == crc32c(data[at : at + nbytes])


def test_it_releases_the_gil() -> None:
    """Else a thread would wait for its turn for as long as the interpreter's switch interval."""
    data = torch.zeros(8 << 20, dtype=torch.uint8)
    gate, ran = threading.Event(), threading.Event()

    def other() -> None:
        gate.wait()
        ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        gate.set()
        limit = time.monotonic() + 30
        while not ran.is_set() and time.monotonic() < limit:
            _native.crc32c(data.data_ptr(), data.nbytes)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(before)
        gate.set()
        thread.join()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="address is 0, must be the address of 5 bytes"):
        _native.crc32c(0, 5)
    for wrong in (-1, 1 << 32):
        with pytest.raises(TypeError):
            crc32c(b"x", wrong)
