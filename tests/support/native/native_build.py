"""Builds of the native core other than the installed one, for the tests that need them.

They are built in build/, so that a second run compiles only what changed; what takes minutes is
kept in the user's cache folder as well, where another clone finds it. An extension is used through
a *shadow*: a folder that looks like the repository, but whose offload package has it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build"
HOME = Path(os.path.expanduser("~"))
CACHE = (HOME if os.access(HOME, os.W_OK) else BUILD) / ".cache" / "hetero-builds"
KEPT = 12  # files in the cache: those used last
CXX = os.environ.get("CXX", "c++")
EXTENSION = "_native" + sysconfig.get_config_var("EXT_SUFFIX")


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


def cached(
    name: str, by: Iterable[str], sources: Iterable[Path], make: Callable[[Path], None]
) -> Path:
    """The file that `make` writes to the path it is given, made once for all processes.

    `by` says how, `sources` of what: while these, the compiler and this Python stay the same, the
    file does.
    """
    versions = succeed([CXX, "--version"]), sys.version
    content = blake2b("\0".join([*by, *versions]).encode(), digest_size=8)
    for source in sources:
        content.update(str(source.relative_to(ROOT)).encode() + b"\0" + source.read_bytes())
    CACHE.mkdir(parents=True, exist_ok=True)
    target = CACHE / f"{content.hexdigest()}-{name}"
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            made = target.with_suffix(".new")
            make(made)
            made.rename(target)
        target.touch()
        found = CACHE.glob("[0-9a-f]" * 16 + "-*")
        for old in sorted(found, key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    return target


def build_extension(name: str, environment: Mapping[str, str]) -> Path:
    """Builds the extension by setup.py in that environment; returns its shadow, build/`name`."""
    shadow = BUILD / name
    (shadow / "offload").mkdir(parents=True, exist_ok=True)

    def make(target: Path) -> None:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(shadow)]
        succeed(command, {"HETERO_WERROR": "1", **environment})
        shutil.copy2(shadow / "offload" / EXTENSION, target)

    sources = [ROOT / "CMakeLists.txt", ROOT / "setup.py", *sorted((ROOT / "native").rglob("*.*"))]
    settings = [f"{key}={value}" for key, value in sorted(environment.items())]
    made = cached(f"{name}.so", settings, sources, make)
    (shadow / "offload" / EXTENSION).unlink(missing_ok=True)
    shutil.copy2(made, shadow / "offload" / EXTENSION)
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
