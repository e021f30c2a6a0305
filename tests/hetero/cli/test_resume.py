"""`hetero train --save-every --resume`: a run that was ended goes on with the same bits."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero.cli.main import main
from hetero.cli.observers import LineObserver
from hetero.reporting.run_record import StepPoint
from tests.support.cli_runs import Refuses, draw_nothing, run_all, words_of
from tests.support.ranks.processes import RankPool

MODEL = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "vocab_size": 256,
    "n_positions": 32,
}
STEPS = 5
Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, which has dropout, a text, and the run `whole` of STEPS steps."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 50)
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        assert main(words_of(tiny(folder), f"--run-dir {folder}/whole")) == 0
    assert not (folder / "whole" / "checkpoints").exists()
    return folder


def tiny(folder: Path) -> str:
    """A run of the folder's model."""
    files = f"--model {folder}/model.json --data {folder}/text"
    batch = "--seq-len 16 --batch-size 2 --grad-accum 2"
    return f"train {files} {batch} --warmup 1 --max-steps {STEPS}"


@pytest.fixture
def command(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a tiny run; the working folder is an empty one."""
    draw_nothing(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tiny(prepared)


@pytest.fixture
def train(command: str, capsys: pytest.CaptureFixture[str]) -> Train:
    """Makes such a run with more options, which must succeed; returns its summary."""

    def run(*options: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main(words_of(command, "--json", *options)) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def lines(folder: str | Path) -> list[Any]:
    """Number, loss, norm and rate of each step that the run has metrics of."""
    found = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [(step["step"], step["loss"], step["grad_norm"], step["lr"]) for step in found]


def checkpoints(folder: str) -> list[int]:
    """The steps that the run has checkpoints of."""
    return sorted(int(path.name[-6:]) for path in (Path(folder) / "checkpoints").iterdir())


def test_a_run_in_parts_has_the_bits_of_one_run(train: Train, prepared: Path) -> None:
    """The steps after the last checkpoint are made again; with other memory, too."""
    saving = "--run-dir parts --save-every 2"
    train(saving)
    assert lines("parts") == lines(prepared / "whole")
    assert checkpoints("parts") == [4, 5]
    for removed, policy, note in (
        (1, "cpu", "resumed after step 4 from parts/checkpoints/step-000004"),
        (2, "nvme", "--resume found no checkpoint, so the run began anew"),
    ):
        for step in checkpoints("parts")[-removed:]:
            shutil.rmtree(f"parts/checkpoints/step-{step:06}")
        summary = train(saving, "--resume --policy", policy)
        assert summary["checkpoint"] == "parts/checkpoints/step-000005"
        assert note in summary["notes"]
        assert lines("parts") == lines(prepared / "whole")


def test_commits_go_on_with_the_bits_of_one_run(
    command: str, train: Train, prepared: Path, refuses: Refuses
) -> None:
    """Without a checkpoint, and with other memory; from a checkpoint that is later."""
    committing = "--run-dir parts --commit-every 2"
    train(committing)
    assert lines("parts") == lines(prepared / "whole")
    assert not Path("parts/checkpoints").exists()
    refuses("already holds a run", command, committing, "--max-steps 6")
    refuses("has all 5 steps; to go on from it ask for more", command, committing, "--resume")
    more = "--max-steps 6 --resume --schedule constant --policy nvme --save-every 11"
    assert "resumed after step 5 from parts/hetero-state" in train(committing, more)["notes"]
    assert checkpoints("parts") == [6]
    assert len(lines("parts")) == 6
    # A new run there would be told whose state it is.
    new = "--run-dir other --nvme-path parts --commit-every 1"
    refuses("has the state of a run that made 6 steps; --resume goes on", command, new)


def test_a_run_goes_back_in_a_folder_of_its_own(
    command: str, train: Train, refuses: Refuses
) -> None:
    """To step 2 with other clipping; started again with the same words it goes on from its own."""
    saving = "--save-every 2 --keep 9 --schedule constant"
    committing = f"{saving} --nvme-path state --commit-every 1"
    Path("state").mkdir()
    train(committing, "--max-steps 6 --run-dir first")
    Path("first/checkpoints/step-000006/manifest.json").write_text("{")
    back = "--max-grad-norm 0.01 --resume first/checkpoints/step-000002"
    said = "is not the last checkpoint of its run, which is first/checkpoints/step-000006"
    refuses(said, command, saving, back, "--max-steps 4")
    said = "state of a run that made 6 steps; --resume goes on"
    refuses(said, command, committing, back, "--max-steps 4 --run-dir second")
    for steps, note in (
        ("4", "resumed after step 2 from first/checkpoints/step-000002"),
        ("5", "resumed after step 4 from second/checkpoints/step-000004"),
    ):
        assert note in train(saving, back, "--run-dir second --max-steps", steps)["notes"]
    assert checkpoints("first") == [2, 4, 6]
    assert checkpoints("second") == [4, 5]
    assert [line[0] for line in lines("second")] == [3, 4, 5]
    assert lines("second")[1] != lines("first")[3]


def test_a_run_does_not_take_the_commits_of_another(
    command: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither later nor earlier ones, which would be overwritten; a folder without steps does."""
    kept = "--schedule constant --commit-every 1 --save-every 2"
    for name, steps in (("a", "3"), ("b", "2")):
        Path(f"state-{name}").mkdir()
        train(kept, f"--run-dir {name} --nvme-path state-{name} --max-steps {steps}")
    kept += " --resume"
    for name, other, made in (("a", "b", 2), ("b", "a", 3)):
        before = lines(name)
        wrong = f"--run-dir {name} --nvme-path state-{other} --max-steps 4"
        capsys.readouterr()
        assert main(words_of(command, kept, wrong)) == 2
        said = capsys.readouterr().err
        folder = Path(other).resolve()
        assert f"state-{other}/hetero-state has the state of the run in {folder}" in said
        assert f"which made {made} steps, and --run-dir {name} has another run; give" in said
        assert lines(name) == before
    # As before, also in a folder that has another name by now, or none of the metrics.
    Path("b").rename("moved")
    for folder, steps in (("moved", 3), ("new", 4), ("new", 5)):
        train(kept, f"--run-dir {folder} --nvme-path state-b --max-steps {steps}")
        assert lines(folder)[-1][0] == steps
    # Commits and metrics of earlier versions do not say of which run they are.
    metrics = Path("a/metrics.jsonl")
    metrics.write_text(re.sub('"run_id": "[0-9a-f]{32}", ', "", metrics.read_text()))
    train(kept, "--run-dir a --nvme-path state-a --max-steps 4")


def test_what_resume_means(command: str, train: Train, refuses: Refuses) -> None:
    saving = "--save-every 1 --keep 3"
    train(saving, "--max-steps 3 --run-dir runs/a --resume")  # from nothing
    assert checkpoints("runs/a") == [1, 2, 3]
    train(saving, "--max-steps 4 --resume")  # the newest run
    assert len(lines("runs/a")) == 4
    train(saving, "--max-steps 5 --resume runs/a")
    assert len(lines("runs/a")) == 5
    train(saving, "--max-steps 5 --resume runs/a/checkpoints/step-000004 --run-dir b")
    assert lines("b") == lines("runs/a")[4:]
    last = "--max-steps 5 --resume runs/a/checkpoints/step-000005"
    refuses("has all 5 steps; to go on from it ask for more", command, saving, last)
    refuses("--resume nothing is no checkpoint", command, saving, "--resume nothing")
    refuses("already holds a run", command, saving, "--run-dir b")


@pytest.mark.usefixtures("nothing_left")
def test_sigterm_saves_and_ends(
    command: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the step that is under way; the run that goes on has the bits of one run."""

    def end(observer: LineObserver, point: StepPoint) -> None:
        if point.last == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LineObserver, "step", end)
    saving = "--run-dir run --save-every 1000 --schedule constant"
    assert main(words_of(command, saving, "--max-steps 100000")) == 143
    assert checkpoints("run") == [2]
    assert json.loads(Path("run/summary.json").read_text())["status"] == "terminated"
    train(saving, "--max-steps 4 --resume")
    assert len(lines("run")) == 4


KILLED = """
    import os, signal, sys
    from hetero.job.loop import Checkpoints
    from tests.support.cli_runs import run_all

    after_step = Checkpoints.after_step

    def killed(self, step):
        first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if step == 5 and first_try and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return after_step(self, step)

    Checkpoints.after_step = killed
    run_all(int(os.environ["RANK"]), 2, ".", [sys.argv[1:]])
"""


@pytest.mark.usefixtures("quick_python")
def test_torchrun_restarts_and_the_run_goes_on(
    command: str, train: Train, tmp_path: Path, ranks2: RankPool
) -> None:
    """A rank is killed; all start again from what was kept last. Then one rank alone goes on, from
    the last commit and from the last checkpoint."""
    program = tmp_path / "killed.py"
    program.write_text(textwrap.dedent(KILLED))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    launch = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --max-restarts 1"
    launch += f" --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 {program}"
    more = f"{command} --policy cpu --threads 1 --max-steps 6 --run-dir"
    ranks2.run(run_all, str(tmp_path), [words_of(more, "whole")])
    keeping = "killed --save-every 3 --commit-every 2 --resume"
    subprocess.run(words_of(launch, more, keeping), env=environment, check=True, timeout=300)
    assert lines("killed") == lines("whole")
    assert json.loads(Path("killed/summary.json").read_text())["steps"] < 6
    found = []
    for kept in ("--commit-every 9", "--save-every 9"):
        train("--policy nvme --max-steps 7 --run-dir killed --resume", kept)
        found.append(lines("killed"))
        assert [line[0] for line in found[-1]] == list(range(1, 8))
        assert found[-1][:6] == lines("whole")
    assert found[0] == found[1]
