"""A system call that the kernel refuses from now on, in a child process made for it."""

from __future__ import annotations

import ctypes
import os
import struct

# Numbers on every architecture.
IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER = 425, 426, 427

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions of a classic BPF program
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # what it returns
_NUMBER, _SECOND_ARGUMENT = 0, 24  # offsets in struct seccomp_data


def refuse(
    syscall: int, errno: int, second_is: int | None = None, second_is_not: int | None = None
) -> None:
    """All threads get `errno` for `syscall`, if its second argument is so or is not so.

    Where seccomp filters are not permitted the process exits with 77, and `run_script` skips.
    """
    refused = [(_RETURN, 0, 0, _ERRNO | errno)]
    if second_is is not None:
        refused = [(_LOAD, 0, 0, _SECOND_ARGUMENT), (_EQUAL, 0, 1, second_is), *refused]
    if second_is_not is not None:
        refused = [(_LOAD, 0, 0, _SECOND_ARGUMENT), (_EQUAL, 1, 0, second_is_not), *refused]
    steps = [
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, len(refused), syscall),
        *refused,
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    seccomp = 317 if os.uname().machine == "x86_64" else 277
    no_new_privs, set_mode_filter, all_threads = 38, 1, 1
    if libc.prctl(no_new_privs, 1, 0, 0, 0) or libc.syscall(
        seccomp, set_mode_filter, all_threads, program
    ):
        raise SystemExit(77)
