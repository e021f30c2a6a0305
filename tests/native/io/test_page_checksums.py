"""native/io/page_checksums: what is read is what was written, or an error that says where not."""

import errno
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import _native
from tests.support.native.io_tools import BLOCK, KINDS, Memory, Striped
from tests.support.waiting import until

PAGE = 4096


class Checked(Striped):
    """A file of several members whose pages have checksums, and memory of the same size."""

    def __init__(self, engine, directory, pages=64, weights=(1,)):
        super().__init__(engine, directory, weights, PAGE, pages * PAGE, checksums=True)
        self.engine = engine
        self.memory = Memory(pages * PAGE)
        self.memory.randomise()

    def write(self, first, pages):
        address = self.memory.address + first * PAGE
        self.engine.write(self.file, address, pages * PAGE, first * PAGE).wait()

    def read(self, first, pages):
        """What was read."""
        into = Memory(pages * PAGE)
        self.engine.read(self.file, into.address, pages * PAGE, first * PAGE).wait()
        return into.bytes[: pages * PAGE]

    def flip(self, byte, bit=0):
        """A bit of the disk's is another one from now on."""
        member, at, _ = self.stripes.place(byte)
        old = os.pread(self.fds[member], 1, at)
        os.pwrite(self.fds[member], bytes([old[0] ^ (1 << bit)]), at)


@pytest.fixture
def checked(engine, tmp_path):
    made = Checked(engine, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("page", [15, 63])
def test_a_flipped_bit_is_an_error_that_says_where(checked, tmp_path, page):
    """(test_any_bit_of_a_known_page_is_guarded has all bits of all pages.)"""
    checked.write(0, 64)
    checked.engine.name_range(checked.file, 0, 64 * PAGE, "the state of chunk 3")
    checked.flip(page * PAGE + 4095, 7)
    into = Memory(64 * PAGE)
    read = checked.engine.read(checked.file, into.address, 64 * PAGE, 0)
    for _ in range(2):  # each time it is asked
        with pytest.raises(_native.NativeIoError, match="chunk 3") as caught:
            read.wait()
        assert caught.value.errno == errno.EBADMSG
        assert caught.value.offset == page * PAGE
        assert caught.value.filename == f"{tmp_path}/member0"
    checked.flip(page * PAGE + 4095, 7)
    assert torch.equal(checked.read(0, 64), checked.memory.bytes)  # the engine works on


def test_memory_is_kept_until_it_was_compared(checked):
    """A read that is done is compared by who waits for it: the arena may be closed by then."""
    checked.write(0, 64)
    arena = _native.Arena(3 * 64 * PAGE)
    transfers, nbytes = arena.transfers, 64 * PAGE
    parts = [arena.address + part * nbytes for part in range(3)]
    reads = [checked.engine.read(checked.file, part, nbytes, 0) for part in parts]
    del arena
    until(lambda: all(read.done() for read in reads))
    assert transfers[0] == 3
    reads[0].wait()
    reads[0].wait()
    assert transfers[0] == 2
    checked.flip(9 * PAGE)  # too late for this one
    reads[1].wait()
    del reads[2]  # nobody wants to know
    assert transfers[0] == 0


def test_a_page_that_is_written_again_is_known_again(checked):
    checked.write(0, 64)
    checked.flip(20 * PAGE)
    checked.memory.bytes[20 * PAGE : 21 * PAGE].zero_()
    checked.write(20, 1)
    assert torch.equal(checked.read(0, 64), checked.memory.bytes)


def test_a_failed_write_is_not_taken_for_what_was_there_before(checked):
    """The page may have half of each: it can be written again, and not be read."""
    checked.write(0, 8)
    checked.memory.randomise()
    checked.memory.bytes.add_(1)
    checked.engine.inject("write", 0, error=errno.EIO)
    with pytest.raises(_native.NativeIoError):
        checked.write(0, 8)
    # (The engine replaces the completion, not the write: so the disk is put back.)
    for page in range(8):
        checked.flip(page * PAGE)
    with pytest.raises(_native.NativeIoError) as caught:
        checked.read(0, 8)
    assert caught.value.errno == errno.EBADMSG
    checked.write(0, 8)
    assert torch.equal(checked.read(0, 8), checked.memory.bytes[: 8 * PAGE])


def test_checksums_are_crc32c_and_can_be_given(checked, engine):
    """What another process has written is compared with what it says it has written."""
    assert checked.engine.checksums(checked.file, 0, 8 * PAGE) == bytes(8 * 4)
    checked.write(0, 64)
    table = checked.engine.checksums(checked.file, 2 * PAGE, 3 * PAGE)
    wanted = [_native.crc32c(checked.memory.address + p * PAGE, PAGE) for p in range(2, 5)]
    assert table == b"".join(value.to_bytes(4, "little") for value in wanted)
    again = engine.add_striped_file([(checked.fds[0], "again")], checked.stripes, checksums=True)
    engine.set_checksums(again, 2 * PAGE, table)
    into = Memory(64 * PAGE)
    engine.read(again, into.address, 64 * PAGE, 0).wait()
    checked.flip(4 * PAGE)
    with pytest.raises(_native.NativeIoError) as caught:
        engine.read(again, into.address, 64 * PAGE, 0).wait()
    assert (caught.value.errno, caught.value.offset) == (errno.EBADMSG, 4 * PAGE)


def test_transfers_are_whole_pages(checked):
    for nbytes, offset in ((100, 0), (PAGE, 100)):
        with pytest.raises(ValueError, match="whole pages of 4096 bytes"):
            checked.engine.read(checked.file, checked.memory.address, nbytes, offset)
    with pytest.raises(ValueError, match="4 bytes a page"):
        checked.engine.set_checksums(checked.file, 0, b"12345")
    with pytest.raises(ValueError, match="whole pages"):
        checked.engine.checksums(checked.file, 1, PAGE)


def test_a_file_without_checksums_has_none(engine, tmp_path):
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600)
    file = engine.add_file(fd, "plain")
    with pytest.raises(ValueError, match="has no checksums"):
        engine.checksums(file, 0, PAGE)
    os.close(fd)


@pytest.mark.parametrize("kind", KINDS)
@given(
    weights=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    writes=st.lists(st.tuples(st.integers(0, 63), st.integers(1, 64)), min_size=1, max_size=6),
    flipped=st.integers(0, 64 * PAGE * 8 - 1),
    read=st.tuples(st.integers(0, 63), st.integers(1, 64)),
)
def test_any_bit_of_a_known_page_is_guarded(kind, weights, writes, flipped, read, tmp_path_factory):
    engine = _native.IoEngine(kind, block_bytes=BLOCK)
    checked = Checked(engine, tmp_path_factory.getbasetemp(), 64, weights)
    known = set()
    for first, pages in writes:
        pages = min(pages, 64 - first)
        checked.write(first, pages)
        known.update(range(first, first + pages))
    checked.flip(flipped // 8, flipped % 8)
    first, pages = read[0], min(read[1], 64 - read[0])
    page = flipped // 8 // PAGE
    if page in known and first <= page < first + pages:
        with pytest.raises(_native.NativeIoError) as caught:
            checked.read(first, pages)
        assert (caught.value.errno, caught.value.offset) == (errno.EBADMSG, page * PAGE)
    else:
        found = checked.read(first, pages)
        for number in known & set(range(first, first + pages)):
            mine = slice((number - first) * PAGE, (number - first + 1) * PAGE)
            wanted = slice(number * PAGE, (number + 1) * PAGE)
            assert torch.equal(found[mine], checked.memory.bytes[wanted])
    checked.close()
    engine.close()


def test_errors_name_the_range_of_the_file(checked):
    """In a file without checksums as well; the last name of a range counts."""
    checked.engine.name_range(checked.file, 0, 8 * PAGE, "what was there")
    checked.engine.name_range(checked.file, 0, 8 * PAGE, "chunk 7")
    for op, transfer in (
        ("write", lambda: checked.write(1, 2)),
        ("read", lambda: checked.read(7, 1)),
    ):
        checked.engine.inject(op, 0, error=errno.EIO)
        with pytest.raises(_native.NativeIoError, match="chunk 7") as caught:
            transfer()
        assert caught.value.errno == errno.EIO
    checked.engine.inject("read", 0, error=errno.EIO)
    with pytest.raises(_native.NativeIoError) as caught:
        checked.read(8, 1)
    assert "chunk 7" not in str(caught.value)


def test_sync_names_the_member(engine, tmp_path):
    """A pipe cannot be made durable."""
    source, sink = os.pipe()
    file = engine.add_file(sink, "member 5")
    with pytest.raises(OSError, match="member 5 cannot be made durable"):
        engine.sync(file)
    os.close(source)
    os.close(sink)


def test_a_table_that_is_reserved_keeps_what_it_has(checked):
    """A larger one is taken, and a smaller one not."""
    checked.write(0, 16)
    table = checked.engine.checksums(checked.file, 0, 64 * PAGE)
    for pages in (64, 16, 0, 1000):
        checked.engine.reserve_checksums(checked.file, pages * PAGE)
        assert checked.engine.checksums(checked.file, 0, 64 * PAGE) == table
    checked.write(16, 48)
    checked.flip(20 * PAGE)
    with pytest.raises(_native.NativeIoError):
        checked.read(20, 1)


def test_a_page_that_was_written_in_vain_is_not_blamed_on_the_disk_alone(checked):
    """The checksum is that of what was to be there."""
    checked.engine.inject("write", 0, error=errno.EIO)
    with pytest.raises(_native.NativeIoError, match="write of"):
        checked.write(0, 1)
    os.pwrite(checked.fds[0], bytes(PAGE), 0)  # what a disk that fails has left
    with pytest.raises(_native.NativeIoError, match="has changed it, unless that write failed"):
        checked.read(0, 1)
