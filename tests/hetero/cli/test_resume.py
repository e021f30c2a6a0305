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
from pathlib import Path
from typing import Any

import pytest

from hetero.cli.main import main
from hetero.cli.observers import LineObserver
from hetero.reporting.run_record import StepPoint
from tests.support.cli_runs import Refuses, draw_nothing, run_all
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


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, which has dropout, a text, and the run `whole` of STEPS steps."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 50)
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        assert main([*arguments_in(folder), "--run-dir", str(folder / "whole")]) == 0
    assert not (folder / "whole" / "checkpoints").exists()
    return folder


def arguments_in(folder: Path) -> list[str]:
    """Of a tiny run."""
    files = ["--config", str(folder / "model.json"), "--data", str(folder / "text")]
    short = ["--seq-len", "16", "--batch-size", "2", "--warmup", "1", "--accumulate", "2"]
    return ["train", *files, *short, "--steps", f"{STEPS}"]


@pytest.fixture
def arguments(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a tiny run, with dropout, in an empty working folder."""
    draw_nothing(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return arguments_in(prepared)


def lines(folder: str | Path) -> list[Any]:
    """Number, loss, norm and rate of each step that the run has metrics of."""
    found = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [(step["step"], step["loss"], step["grad_norm"], step["lr"]) for step in found]


def checkpoints(folder: str | Path) -> list[str]:
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


def test_a_run_in_parts_has_the_bits_of_one_run(
    prepared: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps after the last checkpoint are made again; with other memory, too."""
    saving = [*arguments, "--run-dir", "parts", "--save-every", "2"]
    assert main(saving) == 0
    assert lines("parts") == lines(prepared / "whole")
    assert checkpoints("parts") == ["step-000004", "step-000005"]
    for removed, policy, note in (
        (1, "cpu", "resumed after step 4 from parts/checkpoints/step-000004"),
        (2, "nvme", "--resume found no checkpoint, so the run began anew"),
    ):
        for name in checkpoints("parts")[-removed:]:
            shutil.rmtree(Path("parts/checkpoints") / name)
        capsys.readouterr()
        assert main([*saving, "--resume", "--json", "--policy", policy]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["checkpoint"] == "parts/checkpoints/step-000005"
        assert note in summary["notes"]
        assert lines("parts") == lines(prepared / "whole")


def test_commits_go_on_with_the_bits_of_one_run(
    prepared: Path, arguments: list[str], capsys: pytest.CaptureFixture[str], refuses: Refuses
) -> None:
    """Without a checkpoint, and with other memory; from a checkpoint that is later."""
    committing = [*arguments, "--run-dir", "parts", "--commit-every", "2"]
    assert main(committing) == 0
    assert lines("parts") == lines(prepared / "whole")
    assert not Path("parts/checkpoints").exists()
    capsys.readouterr()
    refuses("already holds a run", committing, "--steps 6")
    refuses("has all 5 steps; to go on from it ask for more", committing, "--resume")
    more = [*committing, "--steps", "6", "--resume", "--json", "--schedule", "constant"]
    assert main([*more, "--policy", "nvme", "--save-every", "11"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert "resumed after step 5 from parts/hetero-state" in summary["notes"]
    assert checkpoints("parts") == ["step-000006"]
    assert len(lines("parts")) == 6
    # A new run there would be told whose state it is.
    new = [*arguments, "--run-dir", "other", "--nvme-path", "parts"]
    refuses("has the state of a run that made 6 steps; --resume goes on", new, "--commit-every 1")


def test_a_run_goes_back_in_a_folder_of_its_own(
    arguments: list[str], capsys: pytest.CaptureFixture[str], refuses: Refuses
) -> None:
    """To step 2 with other clipping; started again with the same words it goes on from its own."""
    saving = [*arguments, "--save-every", "2", "--keep", "9", "--schedule", "constant"]
    committing = [*saving, "--nvme-path", "state", "--commit-every", "1"]
    Path("state").mkdir()
    assert main([*committing, "--steps", "6", "--run-dir", "first"]) == 0
    Path("first/checkpoints/step-000006/manifest.json").write_text("{")
    back = ["--clip", "0.01", "--resume", "first/checkpoints/step-000002", "--steps"]
    refuses(
        "is not the last checkpoint of its run, which is first/checkpoints/step-000006",
        saving,
        back,
        "4",
    )
    refuses(
        "state of a run that made 6 steps; --resume goes on", committing, back, "4 --run-dir second"
    )
    back += ["4", "--run-dir", "second", "--json"]
    for steps, note in (
        ("4", "resumed after step 2 from first/checkpoints/step-000002"),
        ("5", "resumed after step 4 from second/checkpoints/step-000004"),
    ):
        back[back.index("--steps") + 1] = steps
        assert main([*saving, *back]) == 0
        assert note in json.loads(capsys.readouterr().out)["notes"]
    assert checkpoints("first") == ["step-000002", "step-000004", "step-000006"]
    assert checkpoints("second") == ["step-000004", "step-000005"]
    assert [line[0] for line in lines("second")] == [3, 4, 5]
    assert lines("second")[1] != lines("first")[3]


def test_a_run_does_not_take_the_commits_of_another(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither later nor earlier ones, which would be overwritten; a folder without steps does."""
    for name in ("a", "b"):
        Path(f"state-{name}").mkdir()
        kept = [*arguments, "--schedule", "constant", "--commit-every", "1", "--save-every", "2"]
        steps = {"a": "3", "b": "2"}[name]
        first = [*kept, "--steps", steps, "--run-dir", name, "--nvme-path", f"state-{name}"]
        assert main(first) == 0
    for name, other, made in (("a", "b", 2), ("b", "a", 3)):
        before = lines(name)
        wrong = ["--resume", "--run-dir", name, "--nvme-path", f"state-{other}", "--steps", "4"]
        capsys.readouterr()
        assert main([*kept, *wrong]) == 2
        said = capsys.readouterr().err
        folder = Path(other).resolve()
        assert f"state-{other}/hetero-state has the state of the run in {folder}" in said
        assert f"which made {made} steps, and --run-dir {name} has another run; give" in said
        assert lines(name) == before
    # As before, also in a folder that has another name by now, or none of the metrics.
    Path("b").rename("moved")
    for folder, steps in (("moved", 3), ("new", 4), ("new", 5)):
        right = ["--resume", "--run-dir", folder, "--nvme-path", "state-b", "--steps", str(steps)]
        assert main([*kept, *right]) == 0
        assert lines(folder)[-1][0] == steps
    # Commits and metrics of earlier versions do not say of which run they are.
    metrics = Path("a/metrics.jsonl")
    metrics.write_text(re.sub('"run_id": "[0-9a-f]{32}", ', "", metrics.read_text()))
    right = ["--resume", "--run-dir", "a", "--nvme-path", "state-a", "--steps", "4"]
    assert main([*kept, *right]) == 0


def test_what_resume_means(arguments: list[str], refuses: Refuses) -> None:
    saving = [*arguments, "--save-every", "1", "--keep", "3"]
    assert main([*saving, "--steps", "3", "--run-dir", "runs/a", "--resume"]) == 0  # from nothing
    assert checkpoints("runs/a") == ["step-000001", "step-000002", "step-000003"]
    assert main([*saving, "--steps", "4", "--resume"]) == 0  # the newest run
    assert len(lines("runs/a")) == 4
    assert main([*saving, "--steps", "5", "--resume", "runs/a"]) == 0
    assert len(lines("runs/a")) == 5
    path = "runs/a/checkpoints/step-000004"
    assert main([*saving, "--steps", "5", "--resume", path, "--run-dir", "b"]) == 0
    assert lines("b") == lines("runs/a")[4:]
    refuses(
        "has all 5 steps; to go on from it ask for more",
        saving,
        "--steps 5 --resume runs/a/checkpoints/step-000005",
    )
    refuses("--resume nothing is no checkpoint", saving, "--steps 4 --resume nothing")
    refuses("already holds a run", saving, "--steps 4 --run-dir b")


@pytest.mark.usefixtures("nothing_left")
def test_sigterm_saves_and_ends(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the step that is under way; the run that goes on has the bits of one run."""

    def end(observer: LineObserver, point: StepPoint) -> None:
        if point.last == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LineObserver, "step", end)
    saving = [*arguments, "--run-dir", "run", "--save-every", "1000", "--schedule", "constant"]
    assert main([*saving, "--steps", "100000"]) == 143
    assert checkpoints("run") == ["step-000002"]
    assert json.loads(Path("run/summary.json").read_text())["status"] == "terminated"
    assert main([*saving, "--steps", "4", "--resume"]) == 0
    assert len(lines("run")) == 4


KILLED = """
    import os, signal, sys
    from hetero.job.loop import Checkpoints
    from hetero.reporting import charts, page
    from hetero.cli.main import main

    after_step = Checkpoints.after_step

    def killed(self, step):
        first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if step == 5 and first_try and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return after_step(self, step)

    Checkpoints.after_step = killed
    charts.draw_picture = page.write_page = lambda *given: None
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.usefixtures("quick_python")
def test_torchrun_restarts_and_the_run_goes_on(
    arguments: list[str], tmp_path: Path, ranks2: RankPool
) -> None:
    """A rank is killed; all start again from what was kept last. Then one rank alone goes on, from
    the last commit and from the last checkpoint."""
    program = tmp_path / "killed.py"
    program.write_text(textwrap.dedent(KILLED))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    more = [*arguments, "--policy", "cpu", "--threads", "1", "--steps", "6", "--run-dir"]
    keeping = ["--save-every", "3", "--commit-every", "2", "--resume"]
    ranks2.run(run_all, str(tmp_path), [[*more, "whole"]])
    subprocess.run(
        [*launch, str(program), *more, "killed", *keeping],
        env=environment,
        check=True,
        timeout=300,
    )
    assert lines("killed") == lines("whole")
    assert json.loads(Path("killed/summary.json").read_text())["steps"] < 6
    alone = [*arguments, "--policy", "nvme", "--steps", "7", "--run-dir", "killed", "--resume"]
    found = []
    for kept in ("--commit-every", "--save-every"):
        assert main([*alone, kept, "9"]) == 0
        found.append(lines("killed"))
        assert [line[0] for line in found[-1]] == list(range(1, 8))
        assert found[-1][:6] == lines("whole")
    assert found[0] == found[1]
