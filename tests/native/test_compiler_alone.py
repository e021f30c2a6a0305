"""Where CMake or ninja is missing the compiler alone builds the extension, as they would."""

from __future__ import annotations

import json
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

from tests.support.native.native_build import BUILD, CXX, EXTENSION, ROOT, link, succeed

# What only names the target, a folder of headers, or the version of liburing that was found.
LEFT_OUT = ("-D_native_EXPORTS", "-DHETERO_LIBURING", "-I", "-isystem", "-o", "-c", "-pthread")


def setup_names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py defines."""
    monkeypatch.setattr(setuptools, "setup", lambda **given: None)
    return runpy.run_path(str(ROOT / "setup.py"))


def options(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("-") and not word.startswith(LEFT_OUT)}


def test_it_is_given_the_sources_and_options_that_cmake_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = setup_names(monkeypatch)
    build = BUILD / "compile-commands"  # which stays: what CMake finds out takes longest
    build.mkdir(parents=True, exist_ok=True)
    run = subprocess.run
    commands: list[list[str]] = []

    def note(command: list[str], **given: Any) -> Any:
        """Runs none but those that say, or write, what else there is."""
        commands.append(command)
        is_real = {f"-S{ROOT}", sys.executable, str(build / "calls.so")} & set(command)
        return run(command, **given) if is_real else subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", note)
    monkeypatch.setenv("CMAKE_EXPORT_COMPILE_COMMANDS", "ON")
    names["compile_by_cmake"](build, "")
    by_cmake = {
        Path(each["file"]).name: options(shlex.split(each["command"]))
        for each in json.loads((build / "compile_commands.json").read_text())
    }
    commands.clear()
    names["compile_alone"](build, EXTENSION)
    alone = {Path(run[2]).name: options(run) for run in commands if run[1] == "-c"}
    assert alone == by_cmake
    (module,) = (run for run in commands if run[-1].endswith((".o", "-luring")) and "-c" not in run)
    assert {Path(word).stem for word in module if word.endswith(".o")} == {
        Path(file).stem for file in by_cmake
    }


# Minutes; the test above is about all that this adds to a build by CMake.
@pytest.mark.extra
def test_the_module_works(tmp_path: Path) -> None:
    """Without CMake, ninja and pybind11, whose headers torch brings, too."""
    program = """
        import runpy, sys
        sys.modules.update(dict.fromkeys(("cmake", "ninja", "pybind11")))
        sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", sys.argv[1]]
        runpy.run_path("setup.py", run_name="__main__")
    """
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in (CXX, "as", "ld"):
        link(tools / tool, Path(succeed(["which", tool]).strip()))
    lines = "\n".join(line.strip() for line in program.splitlines())
    succeed([sys.executable, "-c", lines, str(tmp_path)], {"PATH": str(tools), "CXX": CXX})
    assert (tmp_path / "offload" / EXTENSION).exists()
    for source in (ROOT / "offload").iterdir():
        if source.is_dir() or source.suffix == ".py":
            link(tmp_path / "offload" / source.name, source)
    code = "import sys; sys.path[0] = sys.argv[1]; import offload._native as native"
    code += "; print(native.__file__, native.isa(), native.cuda_sources().keys())"
    said = succeed([sys.executable, "-c", code, str(tmp_path)])
    assert str(tmp_path) in said
