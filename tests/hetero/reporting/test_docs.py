"""docs/reports.md: its programs run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/reports.md").read_text(), re.DOTALL)
# What each leaves, and what it prints.
LEFT = [("run.html", ""), ("step.trace.json", ""), (None, "hetero::update")]

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize(("program", "left"), list(zip(PROGRAMS, LEFT, strict=True)))
def test_a_program_of_the_page_runs(
    program: str,
    left: tuple[str | None, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/reports.md", "exec"), {})
    file, printed = left
    assert [path.name for path in tmp_path.iterdir()] == ([file] if file else [])
    assert printed in capsys.readouterr().out
