"""bench.tiling: every contender, and the table of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.tiling import __main__ as program
from bench.tiling.contenders import CONTENDERS, Sizes, main


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part, names in CONTENDERS.items() for name in names]
)
def test_every_contender_works(
    part: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = Sizes(32, 4096, 64, tiles=4, path=str(tmp_path))
    assert main([part, name, json.dumps(asdict(sizes))]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] > 0
    assert ("host_memory_bytes" in found) == (part == "linear")


def test_a_table_and_an_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turn: dict[str, Any] = {"seconds": 2.0, "cpu_seconds": 3.0, "grown_bytes": 1e6}
    turn |= {"host_memory_bytes": 5e6, "status": "ended", "error": None, "peak_bytes": 1}
    monkeypatch.setattr(program, "run_trial", lambda *_: turn)
    assert program.main(["--rounds", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = result["contenders"]
    names = [f"{part}: {name}" for part, names in CONTENDERS.items() for name in names]
    assert list(found) == names
    assert found["mlp: tiled"]["cpu_seconds_of_first"]["median"] == 1.0
    text = program.PROGRAM.text(result)
    assert all(part in text for part in ("linear", "2.00 (2.00-2.00)", "4.8 MiB"))
