"""hetero/reporting/report: a page about any training loop, and what recording it costs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.reporting.recorder import Recorder, facts_of
from offload import timeline
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier
from tests.support.ranks.processes import RankPool
from tests.support.run_records import Page, write_words
from tests.support.training.loops import batches, build

pytestmark = pytest.mark.usefixtures("nothing_left")
STEPS = 6


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    write_words(monkeypatch)


def start(path: Path, **options: Any) -> tuple[torch.nn.Module, hetero.HybridAdam]:
    """Optimizer states and some gradients are on NVMe."""
    (path / "nvme").mkdir(exist_ok=True)
    given: dict[str, Any] = {
        "placement_policy": "nvme",
        "host_memory": "1MiB",
        "chunk_numel": 4096,
        "dtype": "fp32",
        "nvme_path": str(path / "nvme"),
    }
    return build(**given | options)


def train(
    model: torch.nn.Module,
    optimizer: hetero.HybridAdam,
    report: hetero.Report | None,
    steps: int = STEPS,
) -> list[float]:
    losses = []
    for tokens in batches(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if report is not None:
            report.step(loss)
        losses.append(loss.item())
    return losses


def test_any_loop_gets_a_page_and_the_same_bits(tmp_path: Path) -> None:
    model, optimizer = start(tmp_path)
    with hetero.report(tmp_path / "out" / "run.html", model, tokens_per_step=64) as report:
        losses = train(model, optimizer, report)
    peak = format_bytes(optimizer.engine.ledger.peak_bytes["host"])
    optimizer.engine.close()
    page = Page.of((tmp_path / "out" / "run.html").read_text())
    assert f"at first {losses[0]:.4g}" in page.text["facts"]
    assert "tokens per second" in page.text["facts"]
    assert "of a budget of 1.0 MiB" in page.text["facts"]
    assert f"at most {peak} of a budget of 1.0 MiB" in page.text["run"]
    assert "GPT2LMHeadModel" in page.text[""]
    assert "on NVMe" in page.text["facts"]
    assert "optimizer state" in page.text["run"]
    assert "training loop" in page.text["timeline"]
    assert "2 steps in a row" in page.text["timeline"]
    assert f"{STEPS}, finished" in page.text["facts"]

    model, optimizer = start(tmp_path)
    assert train(model, optimizer, None) == losses
    optimizer.engine.close()


def test_what_ends_a_block_does_not_take_its_page(tmp_path: Path, words: None) -> None:
    """Of one engine: no step, somebody else's timeline, an error, and the engine's own end."""
    model, optimizer = start(tmp_path)
    with (
        pytest.warns(UserWarning, match="none.html was written, because it has no steps"),
        hetero.report(tmp_path / "none.html", model),
    ):
        pass
    assert not (tmp_path / "none.html").exists()
    with timeline.record() as recording, hetero.report(tmp_path / "other.html", model) as report:
        train(model, optimizer, report)
    assert recording.timeline.of("compute", "forward")
    assert 'id="timeline"' not in (tmp_path / "other.html").read_text()
    with (
        pytest.raises(RuntimeError, match="the disk burns"),
        hetero.report(tmp_path / "error.html", model) as report,
    ):
        train(model, optimizer, report, steps=3)  # a timeline has begun
        raise RuntimeError("the disk burns")
    assert not timeline.is_recording()
    assert "ended by RuntimeError: the disk burns" in (tmp_path / "error.html").read_text()
    with hetero.report(tmp_path / "out", model, title="a <title>") as report:
        train(model, optimizer, report, steps=2)
        report.step()  # without a step of the optimizer, as where gradients overflow
        optimizer.engine.close()
    text = (tmp_path / "out" / "report.html").read_text()  # the name in a folder
    assert "a &lt;title&gt;" in text
    assert "steps per second" in text


def test_what_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    model, optimizer = start(tmp_path)
    (tmp_path / "taken.txt").write_text("mine")
    with pytest.raises(ValueError, match="taken.txt is a file of another kind"):
        hetero.report(tmp_path / "taken.txt", model)
    with pytest.raises(ValueError, match="tokens_per_step must be at least 1, got 0"):
        hetero.report(tmp_path / "run.html", model, tokens_per_step=0)
    with pytest.raises(hetero.UnmanagedParameterError):
        hetero.report(tmp_path / "run.html", torch.nn.Linear(2, 2))
    with (
        pytest.raises(ValueError, match=re.escape("got one of shape (3,)")),
        hetero.report(tmp_path / "run.html", model) as report,
    ):
        report.step(torch.ones(3))
    optimizer.engine.close()


def test_matplotlib_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"matplotlib.*hetero\[train\]"):
        hetero.report(tmp_path / "run.html", torch.nn.Linear(2, 2))


def test_a_step_costs_three_looks_at_memory_and_one_at_the_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = start(tmp_path)
    engine = optimizer.engine
    train(model, optimizer, None, steps=1)
    calls: list[str] = []
    for name in ("_sample", "_counters"):
        real = getattr(Recorder, name)

        def counted(self: Recorder, *given: Any, real: Any = real, name: str = name) -> Any:
            calls.append(name)
            return real(self, *given)

        monkeypatch.setattr(Recorder, name, counted)
    recorder = Recorder(engine, facts_of(engine, "a net"))
    calls.clear()
    train(model, optimizer, None, steps=2)
    made = recorder.end_step(1.0)
    # After forward, after backward, and at the end of step(), of two steps; and once at first.
    assert calls == ["_sample"] * 6 + ["_counters"]
    assert len(made.samples) == 7
    for sample in made.samples:
        assert sample.total(Tier.DISK) > 0
        assert sample.total(Tier.HOST) <= 1 << 20
    assert made.traffic_bytes["disk_read"] > 0
    assert 0 < sum(made.parts_s.values()) <= made.seconds
    recorder.close()
    recorder.close()
    assert not engine.watch.tracer.step_clock.listeners
    train(model, optimizer, None, steps=1)
    assert len(calls) == 7, "a recorder that is closed listens no more"
    engine.close()


def on_ranks(rank: int, world: int, folder: str, reports: bool) -> tuple[list[float], int]:
    """Losses, and bytes sent."""
    model, optimizer = build(placement_policy="cpu", dtype="fp32", chunk_numel=4096)
    if not reports:
        losses = train(model, optimizer, None)
    else:
        with pytest.MonkeyPatch.context() as patch:
            write_words(patch)
            with hetero.report(Path(folder) / f"rank{rank}.html", model) as report:
                losses = train(model, optimizer, report)
    optimizer.engine.close()
    return losses, optimizer.engine.traffic.sent


def test_of_several_ranks_the_first_writes_and_nothing_more_is_sent(
    tmp_path: Path, ranks2: RankPool
) -> None:
    found = ranks2.run(on_ranks, str(tmp_path), True)
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.html"]
    page = Page.of((tmp_path / "rank0.html").read_text())
    assert "2; bytes are of rank 0" in page.text["facts"]
    assert "Sent to other ranks" in page.text["run"]
    assert ranks2.run(on_ranks, str(tmp_path), False) == found
