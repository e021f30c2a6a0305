"""The run folder: what it keeps, and that it vanishes when nothing ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero.job.run_folder import RunFolder


def test_lines_and_files_stay(tmp_path: Path) -> None:
    with RunFolder(str(tmp_path / "a" / "run")) as folder:
        folder.append_metrics({"step": 1})
        folder.append_metrics({"step": 2})
        folder.write_json("summary.json", {"x": 1})
    lines = (tmp_path / "a" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert json.loads((tmp_path / "a" / "run" / "summary.json").read_text()) == {"x": 1}


def test_vanishes_with_the_parents_it_made_when_nothing_ran(tmp_path: Path) -> None:
    with RunFolder(str(tmp_path / "a" / "b" / "run")) as folder:
        assert folder.path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with RunFolder(str(tmp_path / "run")):
        pass
    assert (tmp_path / "run").is_dir()


def test_default_name_is_new_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunFolder(None) as one, RunFolder(None) as two:
        assert one.path != two.path
        assert one.path.parent == two.path.parent == Path("runs")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    with RunFolder(str(tmp_path / "run")) as folder:
        folder.append_metrics({"step": 1})
    with pytest.raises(ValueError, match="already holds a run"), RunFolder(str(tmp_path / "run")):
        pass


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="cannot make --run-dir"), RunFolder(str(path)):
            pass
    assert (tmp_path / "file").read_text() == ""
