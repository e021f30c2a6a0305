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


def test_what_is_found_is_used_if_it_suffices(tmp_path: Path) -> None:
    """One after the other in one folder, as where a machine's liburing is replaced."""
    (tmp_path / "include").mkdir()
    header, source = tmp_path / "include" / "liburing.h", tmp_path / "stub.cpp"
    library, build = tmp_path / "liburing.so", tmp_path / "build"
    lacking = [name for name in EXPORTED if name != "io_uring_register_buffers_sparse"]
    for text, exported, suffices in (
        (HEADER_2_1, EXPORTED, False),
        # The header has it, the library has not: found by the link, not by the import.
        (HEADER_2_1 + SINCE_2_2, lacking, False),
        (HEADER_2_1 + SINCE_2_2, EXPORTED, True),
    ):
        header.write_text(text)
        source.write_text("".join(f'extern "C" void {name}() {{}}\n' for name in exported))
        succeed(["c++", "-shared", "-fPIC", "-o", str(library), str(source)])
        said = " ".join(
            configure_programs(
                build, URING_INCLUDE_DIR=str(header.parent), URING_LIBRARY=str(library)
            ).split()
        )
        if suffices:
            assert f"io_uring engine with liburing unknown ({library})" in said
        else:
            assert "lacks calls that the io_uring engine makes" in said
            assert "the thread-pool engine will be used" in said
            assert "liburing-dev 2.2 or newer" in said
            assert f"liburing unknown ({header}" in said  # not the system's version
        assert ("uring_driver.cpp" in (build / "build.ninja").read_text()) == suffices


def test_all_calls_of_the_driver_are_tried() -> None:
    """So the test above is about all that it needs, and the module has no missing names."""

    def calls(file: str) -> set[str]:
        return set(re.findall(r"\b(io_uring_\w+)\(", (ENGINES / file).read_text()))

    assert calls("uring_driver.cpp") == calls("uring_calls.cpp")
