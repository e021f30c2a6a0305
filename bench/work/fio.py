"""fio as the yardstick: what the disk gives to a program that does nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from bench.harness.rounds import ContenderError
from bench.work.transfers import Shape

INSTALL = "install fio (apt-get install fio) to compare with it"

# The best settings known of fio 3.33 and later, beside those that are part of the measurement:
# registered buffers and file, no clock per block, buffers filled only once, and, what counts most,
# buffers in huge pages (through glibc, since fio's own options need reserved huge pages). Whether
# few system calls or early submission is better depends on the disk and the block size.
TUNED = (
    "--fixedbufs=1",
    "--registerfiles=1",
    "--gtod_reduce=1",
    "--scramble_buffers=0",
    "--thread=1",
)
BATCHED = (
    *TUNED,
    "--iodepth_batch_submit=8",
    "--iodepth_batch_complete_min=1",
    "--iodepth_batch_complete_max=16",
)
SETTINGS: dict[str, tuple[str, ...]] = {
    "fio default": (),
    "fio tuned": TUNED,
    "fio batched": BATCHED,
}
TUNED_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

FIO_PATTERN = {"read": "read", "write": "write", "mixed": "rw"}


def fio_version() -> str | None:
    """What `fio --version` prints, or None where there is no fio."""
    if shutil.which("fio") is None:
        return None
    try:
        done = subprocess.run(
            ("fio", "--version"), capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@dataclass(frozen=True)
class Fio:
    """fio's io_uring engine with O_DIRECT on the file that all contenders use."""

    path: str
    shape: Shape
    settings: tuple[str, ...]
    timeout_s: float = 900.0

    def command(self, pattern: str) -> list[str]:
        """Both directions of "mixed" go through the file in order, in one job."""
        return [
            "fio",
            "--name=bench",
            f"--filename={self.path.replace(':', chr(92) + ':')}",
            "--ioengine=io_uring",
            "--direct=1",
            f"--rw={FIO_PATTERN[pattern]}",
            "--rwmixread=50",
            f"--bs={self.shape.block_bytes}",
            f"--iodepth={self.shape.depth}",
            f"--size={self.shape.size_bytes}",
            f"--io_size={self.shape.moved_bytes(pattern)}",
            "--overwrite=1",
            "--randrepeat=0",
            "--output-format=json",
            *self.settings,
        ]

    def sample(self, pattern: str) -> dict[str, float]:
        """{"gbps", "cpu_s_per_gb"} by fio's own clocks, which leave its start out.

        Raises ContenderError with fio's message when it fails.
        """
        try:
            done = subprocess.run(
                self.command(pattern),
                env=os.environ | (TUNED_ENVIRONMENT if self.settings else {}),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self.timeout_s,
                check=False,
            )
        except FileNotFoundError:
            raise ContenderError(f"there is no fio; {INSTALL}") from None
        except subprocess.TimeoutExpired:
            raise ContenderError(f"fio was not done after {self.timeout_s:.0f} s") from None
        if done.returncode != 0:
            raise ContenderError(f"fio exit code {done.returncode}: {_last_line(done.stderr)}")
        return figures(done.stdout)


def figures(output: str) -> dict[str, float]:
    """The rate and CPU of a job from fio's JSON, which notes may precede."""
    try:
        job: dict[str, Any] = json.loads(output[output.index("{") :])["jobs"][0]
        moved = sum(job[direction]["io_bytes"] for direction in ("read", "write"))
        runtime_s = max(job[direction]["runtime"] for direction in ("read", "write")) / 1e3
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    except (ValueError, LookupError) as error:
        raise ContenderError(f"cannot read fio's output: {error!r}") from error
    if not moved or job["error"]:
        raise ContenderError(f"fio moved {moved} bytes and reports error {job['error']}")
    # Runtimes are whole milliseconds; only a sample too small to mean anything takes less.
    return {"gbps": moved / 1e9 / max(runtime_s, 1e-3), "cpu_s_per_gb": cpu_s / (moved / 1e9)}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
