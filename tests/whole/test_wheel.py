"""The wheel as somebody else installs it: without a compiler, without this checkout.

It is built as `make wheel` builds it, and installed in an environment of its own, which sees the
packages of this one (torch among them) but not the checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from offload import _native
from tests.support.native.native_build import ROOT, find_tool, succeed

pytestmark = [pytest.mark.extra]

MODEL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256}
SHORT = ("--max-steps", "2", "--seq-len", "16", "--batch-size", "2", "--policy", "nvme")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for old in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(old)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    succeed([*build, "-w", str(folder / "built"), str(ROOT)], {"HETERO_WERROR": "1"})
    (built,) = (folder / "built").iterdir()
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    succeed([find_tool("auditwheel"), "repair", "-w", str(folder), str(built)], {"PATH": beside})
    (repaired,) = folder.glob("*.whl")
    return repaired


class Installed:
    """An environment with the wheel, and a working folder that has a package called `bench`."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder / "env", with_pip=False)
        self.bin = folder / "env" / "bin"
        self.python = self.bin / "python"
        here = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        packages = folder / "env" / "lib" / here / "site-packages"
        # A path by itself: the .pth files in it, the checkout's among them, have no effect.
        (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        succeed([*pip, "--no-deps", "--no-index", str(wheel)])
        self.packages = packages
        self.work = folder / "work"
        (self.work / "bench").mkdir(parents=True)
        (self.work / "bench" / "__init__.py").write_text("raise SystemExit('another bench')\n")
        (self.work / "model.json").write_text(json.dumps(MODEL))
        (self.work / "text").write_text("the quick brown fox jumps over the lazy dog. " * 50)

    def run(self, *command: str) -> str:
        """What it prints, with nothing on PATH but the environment: no compiler."""
        environment = {"PATH": str(self.bin), "HOME": str(self.work), "TMPDIR": str(self.work)}
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.work,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


def test_it_has_what_the_tree_has_and_no_generic_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert tops - {"hetero.libs"} == {"hetero", "offload", "hetero-0.1.0.dist-info"}
    kept = {".py", ".pyi", ".json", ".typed"}
    tree = {
        str(path.relative_to(ROOT)): path
        for top in ("hetero", "offload", "bench")
        for path in (ROOT / top).rglob("*")
        if path.suffix in kept or path.name == "py.typed"
    }
    wanted = {f"hetero/benchmarks/{n}" if n.startswith("bench/") else n for n in tree}
    assert wanted == {n for n in names if Path(n).suffix in kept or n.endswith("py.typed")}


def test_it_is_tagged_for_the_glibc_that_it_needs(wheel: Path) -> None:
    assert "manylinux_2_" in wheel.name


def test_it_is_imported_from_its_own_folder(installed: Installed) -> None:
    script = (
        "import hetero, offload._native as native, json;"
        "print(json.dumps([hetero.__file__, native.__file__, native.build_info()['liburing']]))"
    )
    package, native, liburing = json.loads(installed.run("python", "-c", script))
    assert Path(package).is_relative_to(installed.packages)
    assert Path(native).is_relative_to(installed.packages)
    assert liburing == _native.build_info()["liburing"]


def test_version(installed: Installed) -> None:
    assert installed.run("hetero", "--version") == "hetero 0.1.0\n"


def test_it_trains_on_disk(installed: Installed) -> None:
    given = ("--model", "model.json", "--data", "text", "--nvme-path", ".", "--json")
    summary = json.loads(installed.run("hetero", "train", *given, *SHORT))
    assert summary["steps"] == 2
    assert summary["engine"] == ("io_uring" if _uring_works() else "threads")
    assert summary["peak_managed_bytes"]["disk"] > 0


def _uring_works() -> bool:
    try:
        _native.IoEngine("io_uring").close()
    except OSError:
        return False
    return True


def test_its_benchmarks_run_beside_another_package_called_bench(installed: Installed) -> None:
    assert "\nadam " in installed.run("hetero", "bench")
    small = ("--numel", "4Ki", "--rounds", "1", "--peers", "torch", "--json")
    result = json.loads(installed.run("hetero", "bench", "adam", *small))
    assert result["command"].startswith("hetero bench adam --numel 4Ki")
    assert "torch fused AdamW fp32" in result["updates"]
    assert "usage: hetero bench io" in installed.run("hetero", "bench", "io", "--help")
