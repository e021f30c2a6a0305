"""`hetero bench`: what it lists, runs and refuses."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hetero
from bench.harness import program
from hetero.cli import bench as command
from hetero.cli.main import main
from tests.support.cli_runs import Prints, Refuses

ROOT = Path(__file__).resolve().parents[3]


def test_it_lists_every_program_with_a_line(prints: Prints) -> None:
    lines = prints("bench").splitlines()
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    made = re.compile(r'(?:Program|program_parser|\nNAME = )\(?\s*"bench\.([\w.]+)"')
    texts = [path.read_text() for path in (ROOT / "bench").rglob("*.py")]
    assert set(listed) == {name for text in texts for name in made.findall(text)}
    assert listed["adam"].startswith("Update kernels beside")
    assert all(line.endswith(".") for line in listed.values())


def test_every_program_takes_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for name, found in command.programs(ROOT / "bench").items():
        with pytest.raises(SystemExit) as raised:
            importlib.import_module(found.module).main(["--help"])
        assert raised.value.code == 0, name
        assert f"python -m bench.{name}" in capsys.readouterr().out


def test_options_and_the_exit_code_are_the_programs(
    capsys: pytest.CaptureFixture[str], refuses: Refuses
) -> None:
    refuses("bench.adam: error: --numel: must be a whole number", "bench adam --numel none")
    with pytest.raises(SystemExit) as raised:
        main(["bench", "adam", "--help"])
    assert raised.value.code == 0
    assert "usage: python -m bench.adam" in capsys.readouterr().out


def test_an_unknown_name(capsys: pytest.CaptureFixture[str], refuses: Refuses) -> None:
    assert main(["bench", "adm"]) == 2
    assert capsys.readouterr().err == (
        "hetero bench: error: no benchmark is called 'adm'; did you mean adam?\n"
    )
    refuses("`hetero bench` lists them", "bench zzz")


def test_without_a_checkout_it_is_called_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "is_checkout", lambda: False)
    assert program.command_line("bench.io", ["--path", "a b"]) == "hetero bench io --path 'a b'"
    text = program.program_parser("bench.io", "usage: python -m bench.io --x").format_help()
    assert text.startswith("usage: hetero bench io ")
    assert "usage: hetero bench io --x" in text


def test_an_install_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: Refuses
) -> None:
    monkeypatch.setattr(hetero, "__file__", str(tmp_path / "hetero" / "__init__.py"))
    refuses("was installed without its benchmarks", "bench")


def test_a_package_called_bench_is_not_hidden_by_hetero(tmp_path: Path) -> None:
    """The editable install, too, has no top-level `bench`."""
    script = "import importlib.util as util; print(util.find_spec('bench'))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"
