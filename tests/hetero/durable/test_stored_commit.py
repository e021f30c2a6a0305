"""`hetero inspect` and `hetero convert` of a durable state, without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hetero
from hetero.cli.main import main
from tests.support.checkpoint.small_trainings import PLACES, build, first, steps, whole
from tests.support.training.loops import same

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize(("place", "rule"), [("cpu", "adam"), ("disk", "muon")])
def test_a_commit_becomes_a_checkpoint(
    place: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of hetero's, with the same bits; of Hugging Face's, with its parameters."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = {**PLACES[place], "durable": True, "commit_every": 0}
    model, optimizer = build(options, scratch, rule)
    for step in range(2):
        steps(model, optimizer, range(step, step + 1))
        hetero.commit(model, extra={"made": step + 1})
    wanted = whole(model, optimizer)
    first(optimizer).engine.close()
    for path in (scratch, scratch / "hetero-state"):
        assert main(["inspect", str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["kind"], found["step"]) == ("commit of a durable state", 2)
    assert main(["inspect", str(scratch)]) == 0
    assert "first" in capsys.readouterr().out
    out = tmp_path / "converted"
    assert main(["convert", str(scratch), str(out), "--to", "hetero"]) == 0
    model, optimizer = build(PLACES["cpu"], tmp_path, rule, seed=7)
    assert hetero.load(out, model, optimizer).step == 2
    assert same(whole(model, optimizer), wanted)
    first(optimizer).engine.close()
    assert main(["convert", str(scratch), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_the_later_of_commit_and_checkpoint_is_a_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `hetero train --resume` takes it; a state without a commit is none."""
    (tmp_path / "metrics.jsonl").write_text("")
    model, optimizer = build({**PLACES["cpu"], "durable": True, "commit_every": 0}, tmp_path)
    for step, keep in ((1, "save"), (2, "commit"), (3, "save")):
        steps(model, optimizer, range(1))
        if keep == "save":
            hetero.save(tmp_path / "checkpoints" / f"step-{step}", model, optimizer)
        else:
            hetero.commit(model, blocking=True)
        assert main(["inspect", str(tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        kind = {"save": "hetero checkpoint", "commit": "commit of a durable state"}[keep]
        assert (found["kind"], found["step"]) == (kind, step)
    first(optimizer).engine.close()


def test_a_state_without_a_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = build({**PLACES["disk"], "durable": True, "commit_every": 0}, tmp_path)
    steps(model, optimizer, range(1))
    assert main(["inspect", str(tmp_path)]) != 0
    assert "has no commit yet" in capsys.readouterr().err
    assert any(path.suffix == ".data" for path in (tmp_path / "hetero-state").iterdir())
    optimizer.engine.close()
    left = sorted(path.name for path in (tmp_path / "hetero-state").iterdir())
    assert left == ["lock", "set-0", "set-1"]
