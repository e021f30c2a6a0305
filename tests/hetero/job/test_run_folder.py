"""The run folder: its name, and when it vanishes. Tests of the command have what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.job import run_folder
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


def test_two_runs_in_one_folder_at_a_time_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lines would be mixed; the second has a moment's patience for one that was killed."""
    monkeypatch.setattr(run_folder, "_PATIENCE_S", 0.0)
    path = str(tmp_path / "run")
    with RunFolder(path) as first:
        first.append_metrics({"step": 1})
        with pytest.raises(ValueError, match=f"another process trains in --run-dir {path} now"):
            RunFolder(path, resumes=True).__enter__()
        with pytest.raises(ValueError, match="already holds a run"):
            RunFolder(path).__enter__()
    with RunFolder(path, resumes=True) as folder:
        assert folder.has_run(folder.path)


def test_two_runs_that_begin_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = RunFolder(None), RunFolder(None)
    assert one.path == two.path
    with one, two:
        assert one.path != two.path
    assert list(tmp_path.iterdir()) == []
