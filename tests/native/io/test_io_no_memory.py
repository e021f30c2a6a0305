"""native/io: what is left of a transfer that could not be started for want of memory."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.native.native_build import succeed

# The C++ library's operator new, which the module takes from whoever is loaded first.
FAILING_NEW = """
#include <cstdlib>
#include <new>
static thread_local long left = -1;  // allocations of this thread until one fails; -1: none does
extern "C" void fail_after(long count) { left = count; }
void* operator new(std::size_t bytes) {
  if (left == 0) throw std::bad_alloc();
  if (left > 0) --left;
  if (void* made = std::malloc(bytes)) return made;
  throw std::bad_alloc();
}
void operator delete(void* made) noexcept { std::free(made); }
void operator delete(void* made, std::size_t) noexcept { std::free(made); }
"""

SCRIPT = """
import ctypes, os, sys
from offload import _native
fail_after = ctypes.CDLL(os.environ["LD_PRELOAD"]).fail_after
arena = _native.Arena(4096)
engine = _native.IoEngine(sys.argv[1], queue_depth=1, block_bytes=4096)
fd = os.open(sys.argv[2], os.O_TMPFILE | os.O_RDWR)
os.truncate(fd, 4096)
file = engine.add_file(fd, "scratch")
failed = 0
for count in range(12 * 40):  # several times each: not every call makes every allocation
    try:
        fail_after(count // 40)
        op = engine.read(file, arena.address, 4096, 0)
    except MemoryError:
        failed += 1
    else:
        fail_after(-1)
        op.wait()
    finally:
        fail_after(-1)
assert failed < count, "every call was refused"
engine.remove_file(file)
print(failed > 80, arena.transfers[0], engine.stats["in_flight"])
engine.close()
print("closed")
"""


@pytest.mark.skipif(
    "san.so" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer has an operator new itself"
)
def test_a_transfer_that_could_not_be_started_is_forgotten(kind: str, tmp_path: Path) -> None:
    """Else remove_file() and close() wait for it for ever."""
    source, library = tmp_path / "new.cpp", tmp_path / "new.so"
    source.write_text(FAILING_NEW)
    succeed([os.environ.get("CXX", "g++"), "-shared", "-fPIC", str(source), "-o", str(library)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), kind, str(tmp_path)],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "True 0 0\nclosed\n", done.stderr
