"""That `make lint` finds a guarded member used without its mutex."""

import subprocess

from tests.support.native.native_build import ROOT, find_tool

BODIES = {
    "return x;": False,
    "MutexLock lock(mutex); while (x == 0) changed.wait(mutex); return x;": True,
    "MutexLock lock(mutex); { MutexUnlock unlocked(mutex); } return x;": True,
    "MutexLock lock(mutex); MutexUnlock unlocked(mutex); return x;": False,
    "MutexLock(this->mutex); return x;": False,
    "return needs();": False,
    "MutexLock lock(mutex); return needs();": True,
    "MutexLock lock(mutex); MutexUnlock unlocked(mutex); return needs();": False,
}


def test_the_analysis_finds_what_is_used_without_its_mutex(tmp_path):
    functions = "\n".join(f"int f{n}() {{ {body} }}" for n, body in enumerate(BODIES))
    source = tmp_path / "locks.cpp"
    source.write_text(
        f"""#include "base/thread_annotations.h"
using namespace hetero;
struct Counter {{
Mutex mutex;
Condition changed;
int x GUARDED_BY(mutex) = 0;
int needs() REQUIRES(mutex) {{ return x; }}
{functions}
}};
"""
    )
    check = subprocess.run(
        [
            find_tool("clang-tidy"),
            "--quiet",
            "--warnings-as-errors=*",
            "--checks=-*,clang-diagnostic-thread-safety*,bugprone-unused-raii",
            source,
            "--",
            "-std=c++20",
            f"-I{ROOT / 'native'}",
            "-Wthread-safety",
        ],
        capture_output=True,
        text=True,
    )
    first = source.read_text().splitlines().index(functions.splitlines()[0]) + 1
    refused = {n for n in range(len(BODIES)) if f"locks.cpp:{first + n}:" in check.stdout}
    assert refused == {n for n, right in enumerate(BODIES.values()) if not right}
