"""The run folder: its name, and when it vanishes. Tests of the command have what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.job.run_folder import RunFolder


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with RunFolder(str(tmp_path / "run")):
        pass
    assert (tmp_path / "run").is_dir()


def test_default_name_is_new_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which nothing ran vanishes, with the parents that it made."""
    monkeypatch.chdir(tmp_path)
    with RunFolder("a/b/run") as folder:
        assert folder.path.is_dir()
    with RunFolder(None) as one, RunFolder(None) as two:
        assert one.path != two.path
        assert one.path.parent == two.path.parent == Path("runs")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_goes_on_has_not_ended(tmp_path: Path) -> None:
    """A kill may come next: the summary of the start before would call the run finished. A line
    that a kill has cut short, or a full disk, is no step."""
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    whole = ['{"run_id": "a", "step": 1}\n', '{"run_id": "b", "step": 2}\n']
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes("".join(whole).encode() + b'{"run_id": "c", "st\xff')
    assert RunFolder.run_id(tmp_path) == "b"
    with RunFolder(str(tmp_path), resumes=True) as folder:
        folder.go_on_after(1)
        assert metrics.read_text() == whole[0]
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
