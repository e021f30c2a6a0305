"""Memory of other processes, copied by the system."""

from __future__ import annotations

import errno
import os
import signal

import pytest
import torch

from offload import _native
from tests.support.native.io_tools import run_script


def test_another_process_is_read_where_it_lies() -> None:
    theirs = torch.arange(1 << 20)
    mine = torch.zeros_like(theirs)
    go_on, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(go_on, 1)  # until the other end is closed
        os._exit(0)
    try:
        theirs_as_they_were = theirs.clone()
        theirs.zero_()  # this process's pages, not the child's
        _native.read_peer_memory(child, theirs.data_ptr(), mine.data_ptr(), mine.nbytes)
        assert torch.equal(mine, theirs_as_they_were)
        with pytest.raises(OSError, match=f"bytes of process {child}") as caught:
            _native.read_peer_memory(child, 4096, mine.data_ptr(), mine.nbytes)
        assert caught.value.errno == errno.EFAULT
    finally:
        os.close(end)
        os.close(go_on)
        os.waitpid(child, 0)
    with pytest.raises(OSError, match="cannot read 8 bytes") as caught:
        _native.read_peer_memory(child, theirs.data_ptr(), mine.data_ptr(), 8)
    assert caught.value.errno == errno.ESRCH


def test_memory_that_ends_before_what_is_asked_for() -> None:
    """An error, not the part that is there."""
    found = run_script(f"""
        import ctypes, os, signal
        from offload import _native
        arena = _native.Arena(1 << 20, 1 << 20)
        into = ctypes.create_string_buffer(64 << 20)
        ctypes.memset(arena.address, 7, 1 << 20)
        child = os.fork()
        if child == 0:
            signal.pause()
        try:
            _native.read_peer_memory(child, arena.address, ctypes.addressof(into), 1 << 20)
            print(into.raw[: 1 << 20] == b"\\7" * (1 << 20))
            libc = ctypes.CDLL(None)
            try:
                _native.read_peer_memory(
                    child, (1 << 47) - (64 << 20), ctypes.addressof(into), 64 << 20
                )
            except OSError as error:
                print(error.errno)
        finally:
            os.kill(child, {int(signal.SIGKILL)})
            os.waitpid(child, 0)
        """)
    assert found.split() == ["True", str(errno.EFAULT)]
