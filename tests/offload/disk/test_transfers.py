"""Transfers of a scratch file: in the calling thread, and by an engine."""

import errno
import os

import pytest
import torch

from offload.cache.slot_cache import Transfers
from offload.disk import scratch_file as store
from offload.disk.scratch_file import make_io_engine
from offload.errors import StoreError
from offload.memory.arena import HostArena
from offload.memory.sizes import PAGE_BYTES
from offload.memory.tiers import Account
from tests.support.native.scratch_files import MIB, memory_of, open_fds


class TestTransfersInThisThread:
    """read_into and write_from, under what the system may answer."""

    PAGES = 8

    @pytest.fixture
    def content(self, scratch):
        wrote, memory = memory_of(self.PAGES * PAGE_BYTES)
        scratch.reserve(self.PAGES * PAGE_BYTES)
        scratch.write_from(memory, 0)
        return wrote

    @pytest.mark.parametrize("verb", ["preadv", "pwritev"])
    @pytest.mark.parametrize(
        "most", [PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES + 512, 3 * PAGE_BYTES + 1]
    )
    def test_short_transfers_are_gone_on_with(self, scratch, monkeypatch, most, verb):
        """At whole pages: of a page that was cut nothing is taken for moved."""
        nbytes = self.PAGES * PAGE_BYTES
        scratch.reserve(nbytes)
        wrote, memory = memory_of(nbytes)
        read, into = memory_of(nbytes)
        read.zero_()
        real, asked = getattr(os, verb), []

        def short(fd, buffers, offset):
            (buffer,) = buffers
            asked.append((offset, len(buffer)))
            whole = min(len(buffer), most) & -PAGE_BYTES
            real(fd, [buffer[:whole]], offset)
            return min(len(buffer), most)

        monkeypatch.setattr(os, verb, short)
        scratch.write_from(memory, 0)
        scratch.read_into(into, 0)
        assert len(asked) > 1
        assert all(o % PAGE_BYTES == 0 and n % PAGE_BYTES == 0 for o, n in asked)
        assert torch.equal(read, wrote)

    def test_transfers_that_never_get_on_end_in_an_error(self, scratch, content, monkeypatch):
        calls = []

        def stuck(fd, buffers, offset):
            calls.append(offset)
            assert len(calls) < 1000, "would go on for ever"
            return 512

        _, memory = memory_of(self.PAGES * PAGE_BYTES)
        monkeypatch.setattr(os, "preadv", stuck)
        with pytest.raises(StoreError):
            scratch.read_into(memory, 0)

    @pytest.mark.parametrize("verb", ["read", "write"])
    def test_a_failing_disk_is_reported_with_the_place(self, scratch, content, monkeypatch, verb):
        calls = []

        def failing(fd, buffers, offset):
            calls.append(offset)
            if len(calls) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return PAGE_BYTES

        _, memory = memory_of(self.PAGES * PAGE_BYTES)
        monkeypatch.setattr(os, "preadv" if verb == "read" else "pwritev", failing)
        transfer = scratch.read_into if verb == "read" else scratch.write_from
        with pytest.raises(StoreError) as failure:
            transfer(memory, 0)
        assert failure.value.errno == errno.EIO
        for fact in (
            f"{verb} of {7 * PAGE_BYTES} bytes",
            f"offset {PAGE_BYTES}",
            scratch.members[0].path,
        ):
            assert fact in str(failure.value)

    def test_the_end_of_the_file_is_an_error(self, scratch, content):
        _, memory = memory_of(2 * PAGE_BYTES)
        with pytest.raises(StoreError, match="end of the file") as failure:
            scratch.read_into(memory, (self.PAGES - 1) * PAGE_BYTES)
        assert failure.value.errno == errno.EIO

    def test_nothing_to_move_is_nothing_done(self, scratch, monkeypatch):
        monkeypatch.setattr(os, "preadv", None)
        scratch.read_into(memoryview(bytearray()), 0)


class TestEngines:
    def test_auto_falls_back_to_threads_and_says_so(self, monkeypatch):
        real = store.IoEngine

        def refusing(kind, **options):
            if kind == "io_uring":
                raise OSError(errno.EPERM, "io_uring is disabled here")
            return real(kind, **options)

        monkeypatch.setattr(store, "IoEngine", refusing)
        engine, notes = make_io_engine("auto")
        assert engine.kind == "threads"
        (note,) = notes
        assert "io_uring is disabled here" in note
        engine.close()

    def test_what_was_asked_for_is_not_replaced(self, monkeypatch):
        engine, notes = make_io_engine("threads")
        assert (engine.kind, notes) == ("threads", [])
        engine.close()

        def refusing(kind, **options):
            raise OSError(errno.EPERM, "io_uring is disabled here")

        monkeypatch.setattr(store, "IoEngine", refusing)
        with pytest.raises(OSError, match="disabled here"):
            make_io_engine("io_uring")

    def test_transfers_of_a_scratch_file(self, scratch, ledger):
        before = open_fds()
        engine, _ = make_io_engine("auto")
        scratch.reserve(4 * PAGE_BYTES)
        transfers = Transfers(engine, scratch)
        arena = HostArena(2, 4 * PAGE_BYTES, ledger, Account.BUFFER)
        out, back = (arena.view(slot, 1, torch.uint8) for slot in range(2))
        out.random_(0, 256)
        transfers.write(arena.address(0), 4 * PAGE_BYTES, 0).wait()
        transfers.read(arena.address(1), 4 * PAGE_BYTES, 0).wait()
        assert torch.equal(out, back)
        transfers.close()
        transfers.close()
        with pytest.raises(ValueError, match="file"):
            transfers.read(arena.address(1), 4 * PAGE_BYTES, 0)
        engine.close()
        assert open_fds() <= before

    def test_the_file_may_go_while_the_engine_transfers(self, scratch, ledger):
        engine, _ = make_io_engine("auto")
        scratch.reserve(4 * MIB)
        transfers = Transfers(engine, scratch)
        arena = HostArena(1, 4 * MIB, ledger, Account.BUFFER)
        op = transfers.write(arena.address(0), 4 * MIB, 0)
        scratch.close()
        op.wait()
        transfers.close()
        engine.close()
