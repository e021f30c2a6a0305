"""The native tests once more, on builds that AddressSanitizer, UndefinedBehaviorSanitizer and
ThreadSanitizer watch.

Python and torch are not compiled for the sanitizers, so these see what the extension does, and what
others do to its memory by way of malloc, memcpy, system calls and locks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.native.native_build import CXX, ROOT, build_extension

SUPPRESSIONS = ROOT / "tests" / "native" / "tsan.supp"


@dataclass(frozen=True)
class Sanitizer:
    """A set of sanitizers that go together into one build."""

    flags: str  # of -fsanitize=
    runtime: str  # must be in a process before anything else
    tests: tuple[str, ...]  # that run on the build
    without: str  # of those, as a keyword expression
    options: dict[str, str]  # environment variable: options

    def preload(self) -> str:
        """The value of LD_PRELOAD. The C++ library too: the runtime looks for it as it starts."""
        return " ".join(runtime_path(name) for name in (self.runtime, "libstdc++.so"))

    def environment(self, reports: Path) -> dict[str, str]:
        """Of a process that writes its findings to files in `reports`, and stops at the first."""
        log = f"log_path={reports / 'report'}"
        return {
            **os.environ,
            "LD_PRELOAD": self.preload(),
            # Python's own allocator would hide from the leak check what its objects hold.
            "PYTHONMALLOC": "malloc",
            **{name: f"{log}:{options}" for name, options in self.options.items()},
        }


SANITIZERS = {
    "address": Sanitizer(
        flags="address,undefined",
        runtime="libasan.so",
        tests=(
            "tests/native",
            "tests/offload/memory/test_arena.py",
            "tests/offload/disk/test_scratch_file.py",
            "tests/offload/device/test_grad_offload.py",
            "tests/offload/device/test_fetch_queue.py",
        ),
        # A process that changes its user can neither write reports nor be searched for leaks. GCC
        # 12's runtime does nothing at a fork: if another thread, a starting one say, is in its
        # allocator, the child has that lock taken for good, and its own new threads wait for it.
        # What tests of file systems start is Python alone; what others start takes long. The
        # device's kernels that a test compiles are not sanitized; of faults that take their seconds
        # none is needed.
        without="locked_memory_limit or fork or RealMounts or kernel_that_refuses "
        "or test_cuda or stall_together or thirty_seconds or test_peer_memory or environment "
        "or default_is "
        # Which numbers a kernel is given, or gives, is nothing to memory: it is enough that each
        # comes to the end of arrays that are not aligned.
        "or test_crc32c or one_order or torchs_bits or torchs_rounding or agrees_with "
        "or test_state_rounding or unbiased or nearest or every_16_bit or special or finite "
        "or oracle_rounds or too_small_to_be_normal or becomes_its_code_again or written_alone "
        "or rate_zero or unused_rows or small_square or on_a_tie or threads_or_cuts or extremes "
        # A process under the sanitizer has more maps than others have pages.
        "or first_touch or whole_pages or one_kernel_buffer "
        # Processes that import torch under the sanitizer, and of which another one is enough.
        "or file_size_limit or sparse_tables or (may_die_after_python and another)",
        options={
            "ASAN_OPTIONS": "abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            # Python leaves objects behind at exit: our_leaks() reads the reports instead.
            "LSAN_OPTIONS": "exitcode=0",
        },
    ),
    "thread": Sanitizer(
        flags="thread",
        runtime="libtsan.so",
        tests=("tests/native",),
        # ThreadSanitizer gives up in a forked child that starts threads.
        without="locked_memory_limit or fork",
        options={"TSAN_OPTIONS": f"halt_on_error=1:suppressions={SUPPRESSIONS}"},
    ),
}


def runtime_path(name: str) -> str:
    """Where the compiler has a library; the bare name if it has none."""
    run = [CXX, f"-print-file-name={name}"]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()


def missing(sanitizer: Sanitizer) -> str:
    """Why the sanitizer cannot be used here, or nothing."""
    if shutil.which(CXX) is None:
        return f"there is no compiler {CXX}"
    if not os.path.isabs(runtime_path(sanitizer.runtime)):
        return f"{CXX} has no {sanitizer.runtime}"
    environment = {
        **os.environ,
        "LD_PRELOAD": sanitizer.preload(),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    done = subprocess.run(
        [sys.executable, "-c", ""], env=environment, capture_output=True, text=True
    )
    return (
        f"Python does not start with {sanitizer.runtime}: {done.stderr}" if done.returncode else ""
    )


@pytest.fixture(scope="module", params=["address", pytest.param("thread", marks=pytest.mark.extra)])
def name(request: pytest.FixtureRequest) -> str:
    if reason := missing(SANITIZERS[request.param]):
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module")
def shadow(name: str) -> Path:
    return build_extension(f"sanitized-{name}", {"HETERO_SANITIZE": SANITIZERS[name].flags})


# It stops all threads at the end of the process and reads their stacks, and seldom crashes itself
# when one of them is just ending. That is no finding, and says nothing about leaks either.
LEAK_CHECKER_CRASHED = "LeakSanitizer has encountered a fatal error"


def run(name: str, shadow: Path, reports: Path, arguments: list[str]) -> tuple[int, str, str]:
    """Runs Python on the shadow: exit status, output, findings."""
    environment = {**SANITIZERS[name].environment(reports), "PYTHONPATH": str(shadow)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=shadow,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    return done.returncode, done.stdout, findings(reports)


def findings(reports: Path) -> str:
    """The reports, without the leaks that are not the extension's."""
    texts = (report.read_text(errors="replace") for report in sorted(reports.glob("report.*")))
    return "\n".join(
        our_leaks(text) if "LeakSanitizer: detected memory leaks" in text else text
        for text in texts
    ).strip()


def our_leaks(text: str) -> str:
    """The leaks that the extension allocated, but for what it keeps for good at its import."""
    leaks = re.split(r"\n\n", text)
    return "\n\n".join(
        leak
        for leak in leaks
        if re.search(r"^ *#\d+ .*(hetero::|_native\.)", leak, re.M) and "PyInit__native" not in leak
    )


def test_native_tests_have_no_findings(name: str, shadow: Path, tmp_path: Path) -> None:
    # No capture: what UndefinedBehaviorSanitizer says before it ends the process goes to stderr.
    # No fault handler: the sanitizer has its own.
    quiet = ["-x", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    # Programs and libraries that tests build are not sanitized here.
    builders = (
        "test_sanitizers",
        "test_portability",
        "test_compiler_alone",
        "test_liburing",
        "base/test_pool_jobs",
        "base/test_thread_annotations",
    )
    ignored = [f"--ignore=tests/native/{file}.py" for file in builders]
    sanitizer = SANITIZERS[name]
    chosen = ["-m", "not (slow or extra)", "-k", f"not ({sanitizer.without})", *sanitizer.tests]
    few = ["--covering=1", "--hypothesis-profile=sanitized"]
    arguments = ["-m", "pytest", *quiet, *ignored, *chosen, *few]
    status, output, found = run(name, shadow, tmp_path, arguments)
    if LEAK_CHECKER_CRASHED in found:
        again = tmp_path / "again"
        again.mkdir()
        status, output, found = run(name, shadow, again, arguments)
    assert (status, found) == (0, ""), f"{output[-10_000:]}\n{found}"


# Uses of the extension that break what its contract asks of the caller, so that the sanitizer must
# speak up if it watches the extension at all.
MISUSES = {
    "heap-buffer-overflow": (
        "address",
        """
        libc.malloc.restype = ctypes.c_void_p
        _native.sum_of_squares("fp32", libc.malloc(4096), 1025)
        """,
    ),
    "leak of": (
        "address",
        """
        capsule = _native.Arena(4096).export(0, 4096)
        set_name = ctypes.pythonapi.PyCapsule_SetName
        set_name(ctypes.py_object(capsule), b"used_dltensor")  # and nobody calls the deleter
        del capsule
        """,
    ),
    "data race": (
        "thread",
        """
        engine = _native.IoEngine("threads", threads=1)
        arena = _native.Arena(8192)
        file = engine.add_file(os.open(".", os.O_TMPFILE | os.O_RDWR), "scratch")
        engine.write(file, arena.address, 8192, 0).wait()
        reading = engine.read(file, arena.address, 8192, 0)
        libc.memset(ctypes.c_void_p(arena.address), 0, 8192)  # without reading.wait()
        """,
    ),
}


@pytest.mark.parametrize("finding", MISUSES)
def test_a_misuse_of_the_extension_is_found(
    name: str, shadow: Path, tmp_path: Path, finding: str
) -> None:
    finder, script = MISUSES[finding]
    if finder != name:
        pytest.skip(f"found by the sanitizer build `{finder}`")
    prelude = "import ctypes, os\nfrom offload import _native\nlibc = ctypes.CDLL(None)\n"
    _, output, found = run(name, shadow, tmp_path, ["-c", prelude + textwrap.dedent(script)])
    assert finding in found, f"{output}\n{found}"


def test_undefined_behaviour_is_found(name: str, shadow: Path, tmp_path: Path) -> None:
    if "undefined" not in SANITIZERS[name].flags:
        pytest.skip("found by the sanitizer build `address`")
    (extension,) = (shadow / "offload").glob("_native.*.so")
    assert b"__ubsan_handle_" in extension.read_bytes()
    source, program = tmp_path / "overflow.cpp", tmp_path / "overflow"
    source.write_text("int main(int n, char**) { return (0x7fffffff + n) == 0; }\n")
    flags = [f"-fsanitize={SANITIZERS[name].flags}", "-fno-sanitize-recover=all"]
    subprocess.run([CXX, *flags, str(source), "-o", str(program)], check=True)
    environment = {**SANITIZERS[name].environment(tmp_path), "LD_PRELOAD": ""}
    done = subprocess.run([program], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "signed integer overflow" in done.stderr
