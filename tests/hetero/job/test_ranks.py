"""Several ranks of the main job: who says and writes what, and how all learn of a failure."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from bench.harness.ranks import RankError, import_environment, rank_log, run_ranks
from hetero.cli.main import main
from hetero.cli.observers import make_observer
from hetero.job.job import memory_config
from hetero.job.loop import train
from hetero.job.options import TrainOptions, add_train_arguments
from hetero.job.ranks import ALONE, Ranks, joined_ranks
from hetero.job.run import Observer
from hetero.job.run_folder import RunFolder
from hetero.reporting.run_record import RunRecord
from offload.errors import BudgetError
from tests.support.cli_runs import draw_nothing
from tests.support.training.loops import SMALLEST_MODEL

pytestmark = pytest.mark.usefixtures("quick_python")


def two_ranks(tmp_path: Path, *arguments: str) -> list[str]:
    """What both ranks of the program print, rank 0's stdout first."""
    command = (sys.executable, *arguments)
    environment = {**os.environ, **import_environment()}
    run_ranks(command, 2, environment, tmp_path / "x.log", tmp_path / "out", timeout_s=300)
    logs = [rank_log(tmp_path / "x.log", rank, 2).read_text() for rank in range(2)]
    return [(tmp_path / "out").read_text(), *logs]


def script(tmp_path: Path, body: str) -> tuple[str, str]:
    """Arguments of a Python that runs `body` with `ranks`."""
    prelude = f"""\
import pathlib, sys
from hetero.job.ranks import joined_ranks
from hetero.reporting.run_record import RunRecord
from hetero.job.run_folder import RunFolder
from offload.errors import BudgetError
path = {str(tmp_path / "run")!r}
with joined_ranks() as ranks:
"""
    epilogue = """
tasks = pathlib.Path("/proc/self/task").glob("*/comm")
assert not [name for task in tasks if "gloo" in (name := task.read_text())]
"""
    return "-c", prelude + textwrap.indent(textwrap.dedent(body), "    ") + epilogue


def test_without_a_launcher_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined_ranks() as ranks:
        assert ranks is ALONE
    assert ALONE.leads
    assert ALONE.mean(0.1) == 0.1
    assert ALONE.gather(3) == [3]
    assert ALONE.from_first(lambda: "x") == "x"


def test_ranks_that_cannot_be_joined_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK"), joined_ranks():
        pass


def test_ranks_that_share_the_state_divide_all(tmp_path: Path) -> None:
    options, folder = TrainOptions(policy="cpu", shard_ranks=2), RunFolder(str(tmp_path / "run"))
    assert memory_config(options, folder, 0, Ranks(0, 4)).host_memory is None
    with pytest.raises(ValueError, match="--shard-ranks 2 does not divide the 3 ranks"):
        memory_config(options, folder, 0, Ranks(0, 3))


def test_ranks_of_other_machines_have_no_share_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a limit that holds for two ranks here is not divided by all four."""
    monkeypatch.setattr("hetero.job.ranks._initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with joined_ranks() as ranks:
        assert ranks == Ranks(2, 4, local=2)


def test_what_ranks_tell_each_other_and_the_first_alone_writes(tmp_path: Path) -> None:
    body = """
    assert ranks.count == 2
    assert ranks.gather(2.0**40 + ranks.rank) == [2.0**40, 2.0**40 + 1]
    assert ranks.mean(0.1 * ranks.rank) == 0.05
    assert ranks.from_first(lambda: f"of rank {ranks.rank}") == "of rank 0"
    def refuse():
        assert ranks.leads, "only rank 0 decides"
        raise ValueError("no")
    try:
        ranks.from_first(refuse)
    except ValueError as error:
        assert str(error) == "no"
    else:
        raise AssertionError("not refused")
    assert ranks.mean(1.0) == 1.0
    with RunFolder(path if ranks.leads else "elsewhere", ranks) as folder:
        assert str(folder.path) == path
        for _ in range(2):
            folder.append_metrics({"rank": ranks.rank})
        folder.write_json("summary.json", {"rank": ranks.rank})
        before = sorted(pathlib.Path(path).iterdir())
        folder.require_shared("it")
        if not ranks.leads:
            folder.path = pathlib.Path("elsewhere")
        try:
            folder.require_shared("it")
        except ValueError as error:
            assert str(error).startswith("rank 1 on ") and "does not see --run-dir" in str(error)
        else:
            raise AssertionError("not refused")
        assert not ranks.leads or sorted(pathlib.Path(path).iterdir()) == before
    try:
        with RunFolder(path, ranks):
            raise AssertionError("not refused")
    except ValueError as error:
        assert "already holds a run" in str(error)
    import torch.distributed.nn.functional  # as torch's compiler does when a model loads it
    """
    two_ranks(tmp_path, *script(tmp_path, body))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"rank": 0}] * 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == {"rank": 0}
    assert not Path("elsewhere").exists()


def test_a_rank_that_is_gone_is_an_error_that_says_where_to_look(tmp_path: Path) -> None:
    body = """
    if ranks.rank == 1:
        import os
        os._exit(0)
    ranks.mean(1.0)
    """
    with pytest.raises(RankError, match="rank 0 of 2 lost another rank, which ended or hangs"):
        two_ranks(tmp_path, *script(tmp_path, body))


def test_ranks_but_the_first_show_nothing() -> None:
    assert type(make_observer(1, Ranks(1, 2))) is Observer
    assert type(make_observer(1, Ranks(0, 2))) is not Observer


# `hetero` as one of two ranks, which draws nothing.
UNDRAWN = """
import sys
from tests.support.cli_runs import run_all

run_all(0, 2, ".", [sys.argv[1:]])
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    draw_nothing(monkeypatch)
    (tmp_path / "model.json").write_text(json.dumps(SMALLEST_MODEL))
    (tmp_path / "text").write_bytes(bytes(range(256)) * 4)
    return [
        *("-c", UNDRAWN, "train", "--json", "--dtype", "fp32"),
        *("--model", str(tmp_path / "model.json"), "--data", str(tmp_path / "text")),
        *("--max-steps", "3", "--seq-len", "8", "--batch-size", "2", "--threads", "1"),
        # Rates from the first step on, so that later losses depend on the updates.
        *("--lr", "0.01", "--warmup", "0", "--schedule", "constant"),
    ]


# A budget that is too small for one process.
FOR_A_SHARE = ("--host-memory", "400KiB", "--chunk-numel", "8192")


def test_hetero_train_as_two_ranks(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """(tests/whole has other placements and stages of several ranks.)"""
    more = ("--policy", "cpu", *FOR_A_SHARE, "--run-dir", str(tmp_path / "run"))
    more = (*more, "--timeline", str(tmp_path / "steps.json"))
    out, first, second = two_ranks(tmp_path, *options, *more)
    assert out.count("\n") == 1
    assert "step 3/3" in first
    assert "step" not in second
    result = json.loads(out)
    assert (result["ranks"], result["status"]) == (2, "finished")
    assert len(result["peak_rss_by_rank_bytes"]) == 2
    # Gradients, and either updated or gathered parameters: each at least half of the model, fp32.
    assert result["sent_bytes_per_step"] > 2 * (result["params"] // 2 * 4)
    assert result["received_bytes_per_step"] > 2 * (result["params"] // 2 * 4)
    assert result["gather_wait_s_per_step"] > 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == [2 * 2 * 8] * 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == result
    assert (tmp_path / "run" / "figure.png").exists()
    trace = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    assert [event["name"] for event in trace].count("forward") == 2  # steps, of the first rank
    capsys.readouterr()
    other = ("--policy", "cpu", "--run-dir", str(tmp_path / "alone"), "--grad-accum", "2")
    assert main([*options[2:], *other]) == 0
    # The same batches, in another grouping.
    alone = json.loads(capsys.readouterr().out)
    assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert result["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-4)
    assert alone["losses"][-1] < alone["losses"][0] - 0.01


def test_one_process_alone_is_refused_the_budget_of_a_share(
    options: list[str], tmp_path: Path
) -> None:
    """With which two do train: test_hetero_train_as_two_ranks."""
    options += ["--policy", "cpu", *FOR_A_SHARE]
    with pytest.raises(BudgetError):
        train_options(options[3:], RunFolder(str(tmp_path / "alone")))


def train_options(arguments: list[str], folder: RunFolder, ranks: Ranks = ALONE) -> RunRecord:
    """`hetero train` with these arguments, its result."""
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    parsed = TrainOptions.from_namespace(parser.parse_args(arguments))
    with folder:
        return train(parsed, folder, Observer(), ranks)


class AstrayElsewhere(Ranks):
    """Another rank's loss is no number."""

    def mean(self, value: float) -> float:
        return value * float("nan")


def test_a_loss_that_is_no_number_on_another_rank_stops_this_one(
    options: list[str], tmp_path: Path
) -> None:
    arguments = [*options[3:], "--policy", "cpu"]
    result = train_options(arguments, RunFolder(str(tmp_path / "run")), AstrayElsewhere())
    assert (result.status, result.points) == ("failed", [])
    assert "the loss became nan in step 1" in (result.error or "")
