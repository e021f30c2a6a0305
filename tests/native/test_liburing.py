"""Which liburing the extension is built with: an old one is left aside, a shared one suffices."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.native.native_build import ROOT, configure_programs, succeed

ENGINES = ROOT / "native" / "io" / "engines"

# What the shared library of liburing 2.2 and 2.3 exports of what the driver could call: not
# io_uring_enable_rings, for example, which the archive has.
EXPORTED = [
    "__io_uring_get_cqe",
    "io_uring_get_sqe",
    "io_uring_queue_exit",
    "io_uring_queue_init",
    "io_uring_register_buffers_sparse",
    "io_uring_register_buffers_update_tag",
    "io_uring_ring_dontfork",
    "io_uring_submit_and_wait",
    "io_uring_unregister_buffers",
]

# As much of the header of liburing 2.1 as the driver's calls need.
HEADER_2_1 = """
#include <sys/uio.h>
struct io_uring {};
struct io_uring_sqe {};
struct io_uring_cqe { unsigned long long user_data; };
extern "C" {
int io_uring_queue_init(unsigned, io_uring*, unsigned);
void io_uring_queue_exit(io_uring*);
int io_uring_ring_dontfork(io_uring*);
int io_uring_register_buffers_update_tag(io_uring*, unsigned, const iovec*,
                                         const unsigned long long*, unsigned);
int io_uring_unregister_buffers(io_uring*);
io_uring_sqe* io_uring_get_sqe(io_uring*);
int io_uring_submit_and_wait(io_uring*, unsigned);
}
inline void io_uring_prep_read(io_uring_sqe*, int, void*, unsigned, unsigned long long) {}
inline void io_uring_prep_write(io_uring_sqe*, int, const void*, unsigned, unsigned long long) {}
inline void io_uring_prep_read_fixed(io_uring_sqe*, int, void*, unsigned, unsigned long long, int)
{}
inline void io_uring_prep_write_fixed(io_uring_sqe*, int, const void*, unsigned, unsigned long long,
                                      int) {}
inline int io_uring_wait_cqe(io_uring*, io_uring_cqe**) { return 0; }
#define io_uring_for_each_cqe(ring, head, cqe) for (head = 0; head != 0;)
inline void io_uring_cq_advance(io_uring*, unsigned) {}
"""
SINCE_2_2 = """
extern "C" int io_uring_register_buffers_sparse(io_uring*, unsigned);
inline void io_uring_sqe_set_data64(io_uring_sqe*, unsigned long long) {}
"""


def configure(folder: Path, header: str, exported: list[str]) -> str:
    """What CMake says where a liburing of that header and shared library is found first."""
    (folder / "include").mkdir()
    (folder / "include" / "liburing.h").write_text(header)
    source, library = folder / "stub.cpp", folder / "liburing.so"
    source.write_text("".join(f'extern "C" void {name}() {{}}\n' for name in exported))
    succeed(["c++", "-shared", "-fPIC", "-o", str(library), str(source)])
    said = configure_programs(
        folder / "build",
        URING_INCLUDE_DIR=str(folder / "include"),
        URING_LIBRARY=str(library),
    )
    return " ".join(said.split())


def has_driver(folder: Path) -> bool:
    return "uring_driver.cpp" in (folder / "build" / "build.ninja").read_text()


def test_an_old_header_gives_the_thread_engine(tmp_path: Path) -> None:
    said = configure(tmp_path, HEADER_2_1, EXPORTED)
    assert "lacks calls that the io_uring engine makes" in said
    assert "the thread-pool engine will be used" in said
    assert "liburing-dev 2.2 or newer" in said
    assert f"liburing unknown ({tmp_path}/include/liburing.h" in said  # not the system's version
    assert not has_driver(tmp_path)


def test_a_shared_library_without_a_call_gives_the_thread_engine(tmp_path: Path) -> None:
    """The header has it, the library has not: found by the link, not by the import."""
    left = [name for name in EXPORTED if name != "io_uring_register_buffers_sparse"]
    assert "lacks calls" in configure(tmp_path, HEADER_2_1 + SINCE_2_2, left)
    assert not has_driver(tmp_path)


def test_the_shared_library_of_2_2_suffices(tmp_path: Path) -> None:
    said = configure(tmp_path, HEADER_2_1 + SINCE_2_2, EXPORTED)
    assert f"io_uring engine with liburing unknown ({tmp_path}/liburing.so)" in said
    assert has_driver(tmp_path)


def test_all_calls_of_the_driver_are_tried() -> None:
    """So the tests above are about all that it needs, and the module has no missing names."""

    def calls(file: str) -> set[str]:
        return set(re.findall(r"\b(io_uring_\w+)\(", (ENGINES / file).read_text()))

    assert calls("uring_driver.cpp") == calls("uring_calls.cpp")
