"""Every code block of README.md and docs/ is run, or, a command line, parsed as its program does.

Python blocks of a page run one after the other in one namespace, in an empty folder. What their
comments mean is in tests/README.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.cli.main import main as hetero_main
from tests.support.cli_runs import draw_once
from tests.support.documents.blocks import LANGUAGES, PAGES, ROOT, Block, all_blocks
from tests.support.documents.commands import check, commands_of

# Pages that may have blocks that are run.
RUN = [
    page
    for page in PAGES
    if re.search(r"^```python|^<!-- (?:run|output|file)", page.read_text(), re.MULTILINE)
]
# Blocks that no test runs, each with its reason in the page. Let there not be more of them.
MOST_NOT_RUN = 2
SCRIPTS = Path(sys.executable).parent
# What documents write for a directory on NVMe, for which a test has one of its own.
NVME = re.compile(r"/mnt/nvme[\w-]*(?:/[\w-]+)*")


def is_run(block: Block) -> bool:
    """Whether a test executes the block."""
    wanted = block.language == "python" or {"run", "output", "file"} & set(block.says)
    needed = block.says.get("needs")
    has = needed is None or importlib.util.find_spec(needed) is not None
    return bool(wanted) and has and "not run" not in block.says


def is_parsed(block: Block) -> bool:
    """Whether a test has the block's command lines parsed."""
    return block.language == "bash" and not {"run", "not run"} & set(block.says)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; torch is as it was afterwards. Models are small: one thread."""
    monkeypatch.chdir(tmp_path)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_rng_state(state)
    torch.set_num_threads(threads)


def test_blocks_name_their_language_and_few_are_not_run() -> None:
    blocks = [block for found in all_blocks().values() for block in found]
    unnamed = [block.place for block in blocks if block.language not in LANGUAGES]
    assert not unnamed, "write ```python, ```bash or ```text"
    reasons = {block.place: block.says["not run"] for block in blocks if "not run" in block.says}
    assert all(reasons.values()), reasons
    assert len(reasons) <= MOST_NOT_RUN, reasons


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
@pytest.mark.usefixtures("nothing_left", "quick_python")
def test_what_is_run(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_once(monkeypatch)
    names: dict[str, Any] = {"__name__": "document", "monkeypatch": monkeypatch}
    printed = ""
    for block in filter(is_run, all_blocks()[page]):
        text = with_folders(block.text, folder)
        if "file" in block.says:
            (folder / block.says["file"]).write_text(text)
        run_python(with_folders(block.says.get("setup", ""), folder), block, 0, names)
        if block.language == "python":
            run_python(text, block, block.line - 1, names)
        elif "run" in block.says:
            printed = run_shell(text, block, folder)
        elif "output" in block.says:
            assert without_ends(printed) == without_ends(text), block.place


def test_what_is_parsed() -> None:
    wrong = []
    for block in (block for found in all_blocks().values() for block in filter(is_parsed, found)):
        for words in commands_of(block.text):
            try:
                check(words)
            except (AssertionError, ImportError, ValueError) as error:
                wrong.append(f"{block.place}: {shlex.join(words)}\n    {error}")
    assert not wrong, "\n".join(wrong)


def with_folders(text: str, folder: Path) -> str:
    """The text with directories of the test in the place of those on NVMe."""
    for found in NVME.findall(text):
        (folder / found[1:]).mkdir(parents=True, exist_ok=True)
    return NVME.sub(lambda found: str(folder / found[0][1:]), text)


def run_python(text: str, block: Block, lines_before: int, names: dict[str, Any]) -> None:
    """Python, of which tracebacks name the page's lines."""
    try:
        exec(compile("\n" * lines_before + text, block.page, "exec"), names)
    except Exception:
        pytest.fail(f"{block.place}\n{traceback.format_exc()}", pytrace=False)


def run_shell(text: str, block: Block, folder: Path) -> str:
    """What a shell block prints, with the commands of this environment.

    Those of hetero alone run in this process, which has imported what they need.
    """
    commands = commands_of(text)
    if all(words[0] == "hetero" for words in commands):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            codes = [hetero_main(words[1:]) for words in commands]
        assert not any(codes), f"{block.place}\n{printed.getvalue()}"
        return printed.getvalue()
    bash = shutil.which("bash")
    assert bash is not None
    quick = Path(sys.executable).parent
    search = os.pathsep.join([str(quick), str(SCRIPTS), os.environ["PATH"]])
    variables = {**os.environ, "PATH": search, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    variables["XDG_CACHE_HOME"] = str(folder / "cache")
    variables["PET_STANDALONE"] = "1"  # torchrun takes a free port
    variables["PYTHON_EXEC"] = sys.executable  # which it starts ranks by
    done = subprocess.run(
        [bash, "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{block.place}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def without_ends(text: str) -> list[str]:
    """Lines without blanks at their ends, of which tables have some."""
    return [line.rstrip() for line in text.strip().splitlines()]
