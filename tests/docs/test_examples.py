"""The scripts in docs/examples, as a user runs them, on a tiny model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.support.ecosystem.tiny_tokenizer import CHAT_TEMPLATE, model_folder

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
# By script, the library that it needs beside transformers, and the folder that it leaves.
NEEDS = {
    "accelerate_loop": ("accelerate", "state"),
    "lightning_module": ("lightning", "tuned"),
    "merge_adapter": ("peft", "merged"),
    "plain_loop": ("tensorboard", "tuned"),
    "sft": ("trl", "tuned"),
    "trainer": ("peft", "adapter"),
}
GOES_ON = ("accelerate_loop", "plain_loop", "trainer")


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed, result = NEEDS[name]
    pytest.importorskip(needed, reason="pip install 'hetero[ecosystem]'")
    model_folder(tmp_path / "model", CHAT_TEMPLATE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "model", "work"])
    for _ in range(2 if name in GOES_ON else 1):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert any((tmp_path / "work" / result).iterdir())


def test_they_are_short() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lines
    assert max(lines.values()) <= 60, lines
