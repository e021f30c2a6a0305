"""Builds of the native core other than the installed one, for the tests that need them.

They are kept in build/, so that a second run compiles only what changed. An extension is used
through a *shadow*: a folder that looks like the repository, but whose offload package has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build"


def succeed(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    """What the command prints. AssertionError with all of it if it fails."""
    environment = {**os.environ, **(environment or {})}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


def find_tool(name: str) -> str:
    """A tool of this Python's environment, or else of the system."""
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    assert found, f"{name} is not installed; it belongs to the extra `test`"
    return found


def build_extension(name: str, environment: Mapping[str, str]) -> Path:
    """Builds the extension by setup.py in that environment; returns its shadow, build/`name`."""
    shadow = BUILD / name
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(shadow)]
    succeed(command, {"HETERO_WERROR": "1", **environment})
    for top in ("bench", "hetero", "tests", "pyproject.toml"):
        link(shadow / top, ROOT / top)
    for old in (shadow / "offload").iterdir():
        if old.is_symlink():
            old.unlink()
    for source in (ROOT / "offload").iterdir():
        if source.is_dir() or source.suffix in (".py", ".pyi"):
            link(shadow / "offload" / source.name, source)
    return shadow


def link(at: Path, target: Path) -> None:
    if not at.is_symlink():
        at.symlink_to(target)


def build_program(name: str, target: str, **options: str) -> Path:
    """Builds a native test program with these CMake options; returns the build's folder."""
    folder = BUILD / name
    configure_programs(folder, **options)
    jobs = ["--parallel", os.environ["HETERO_JOBS"]] if "HETERO_JOBS" in os.environ else []
    succeed([find_tool("cmake"), "--build", str(folder), "--target", target, *jobs])
    return folder


def configure_programs(folder: Path, **options: str) -> str:
    """Makes `folder` a build of the native test programs; returns what CMake says."""
    fixed = {
        "CMAKE_MAKE_PROGRAM": find_tool("ninja"),
        "HETERO_PYTHON": "OFF",
        "HETERO_TESTS": "ON",
        "HETERO_WERROR": "ON",
    }
    defines = [f"-D{key}={value}" for key, value in {**fixed, **options}.items()]
    return succeed([find_tool("cmake"), f"-S{ROOT}", f"-B{folder}", "-GNinja", *defines])
