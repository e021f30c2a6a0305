"""`hetero inspect` and `hetero convert` of a durable state, without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hetero
from hetero.cli.main import main
from tests.hetero.checkpoint.test_save_load import PLACES, build, first, same, steps, whole

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("rule", ["adam", "muon"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
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


def test_a_state_without_a_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = build({**PLACES["disk"], "durable": True, "commit_every": 0}, tmp_path)
    steps(model, optimizer, range(1))
    assert main(["inspect", str(tmp_path)]) != 0
    assert "has no commit yet" in capsys.readouterr().err
    optimizer.engine.close()
