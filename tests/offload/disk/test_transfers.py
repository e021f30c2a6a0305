"""Transfers of a scratch file by an engine."""

import errno

import pytest
import torch

from offload.cache.slot_cache import Transfers
from offload.disk import scratch_file as store
from offload.disk.scratch_file import make_io_engine
from offload.memory.arena import HostArena
from offload.memory.sizes import PAGE_BYTES
from offload.memory.tiers import Account
from tests.support.native.scratch_files import MIB
from tests.support.own_process import descriptors


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
        before = descriptors()
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
        assert descriptors() <= before

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
