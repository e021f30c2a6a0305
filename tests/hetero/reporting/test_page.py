"""hetero/reporting/page: the structure of the page, that it needs nothing else, its numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hetero.reporting.charts import draw_run, moments
from hetero.reporting.page import make_page, write_page
from hetero.reporting.run_record import LINKS, RunRecord, thinned
from offload.memory.tiers import Tier
from tests.support.run_records import MIB, Page, make_record, point, sample, write_words


def ranked() -> RunRecord:
    """A run of two ranks."""
    traffic = dict.fromkeys(LINKS, 0) | {"sent": 3 * MIB, "received": 3 * MIB}
    points = [point(n, traffic_bytes=traffic, gather_wait_s=0.5) for n in range(1, 5)]
    record = make_record(points=points)
    return replace(record, facts=replace(record.facts, ranks=2))


def long() -> RunRecord:
    """A run of 2000 steps of which one in the middle held most."""
    points = [point(n) for n in range(1, 2001)]
    points[1234] = point(1235, samples=(sample(2470.0, 70 * MIB),))
    return make_record(points=points)


def short() -> RunRecord:
    """One step of which little is known, without budgets, with state in RAM alone."""
    return make_record(
        points=[point(1, loss=None, tokens=None, samples=(sample(1.0),))],
        budget_bytes=dict.fromkeys(Tier),
        peak_bytes={Tier.DEVICE: 0, Tier.HOST: 160 * MIB, Tier.DISK: 0},
        predicted=None,
        timeline=None,
    )


@pytest.mark.parametrize("made", [make_record, ranked, long, short])
def test_the_page_is_whole_and_needs_nothing_from_elsewhere(made: Callable[[], RunRecord]) -> None:
    text = make_page(made())
    page = Page.of(text)
    assert text.startswith("<!DOCTYPE html>")
    assert len(text) < 400_000
    assert len(page.ids) == len(set(page.ids)), "names are unique"
    assert page.references, "charts use their own parts"
    assert "A step takes" in page.text["run"], "texts of charts are text"
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert set(re.findall(r"url\(([^)]?)", text)) <= {"#"}
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "@import" not in text
    elsewhere = {
        value
        for name, value in page.attributes
        if "//" in value and name not in ("xmlns", "xmlns:xlink")
    }
    assert not elsewhere
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert len(labels) == page.tags["svg"]
    assert all(labels)
    assert "@media print" in text


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    write_words(monkeypatch)


@pytest.mark.usefixtures("words")
def test_sections_and_numbers() -> None:
    page = Page.of(make_page(make_record()))
    sections = ["facts", "run", "timeline"]
    assert [each for each in page.ids if each in sections] == sections
    top = page.text[""]
    assert "tiny <net> & co" in top
    for words in ("160.0 MiB in RAM", "310.0 MiB on NVMe", "50 tokens per second"):
        assert words in top, words
    facts = page.text["facts"]
    for words in (
        "at most 160.0 MiB, of a budget of 200.0 MiB",
        "at most 310.0 MiB, no budget",
        "at most 450.0 MiB",
        'a "text"',
        "10,000,000",
        "NVMe read 7.0 MiB, NVMe written 1.0 MiB",
        "a note",
        "1.000 s: forward 0.250; backward 0.500; update 0.250; bound by NVMe; measured is 2.00",
        "NVMe read 14.0 MiB and written 1.0 MiB, of model state alone",
        "gradients 5.0 MiB in RAM and 50.0 MiB on NVMe; optimizer state 200.0 MiB on NVMe",
    ):
        assert words in facts, words
    run = page.text["run"]
    for words in (
        "Memory stayed within its budget",
        "Model state in RAM: at most 160.0 MiB of a budget of 200.0 MiB (80%)",
        "budget: 200.0 MiB",
        "plain PyTorch's model state: 160.0 MiB",
        "whole process (RSS): at most 450.0 MiB",
        "parameters: 100.0 MiB",
        "activations: 20.0 MiB",
        "optimizer state: 200.0 MiB",
        "spare extents: 50.0 MiB",
        "Loss: at first 5, at last 1",
        "A step takes 2 s, 50% of it backward",
        "NVMe read 7.0 MiB, NVMe written 1.0 MiB per step",
    ):
        assert words in run, words
    assert "67% of the 1.5 s of updates and transfers" in page.text["timeline"]
    assert "overlap: work during" in page.text["timeline"]


@pytest.mark.usefixtures("words")
def test_bytes_between_ranks_are_there_with_several() -> None:
    page = Page.of(make_page(ranked()))
    assert "Sent to other ranks 3.0 MiB, received from other ranks 3.0 MiB" in page.text["run"]
    assert "bytes are of rank 0" in page.text["facts"]
    assert "0.500 s per step" in page.text["facts"]
    assert "other ranks" not in Page.of(make_page(make_record())).text["run"]


@pytest.mark.usefixtures("words")
def test_a_budget_that_was_passed_is_not_called_kept() -> None:
    peaks = {Tier.DEVICE: 0, Tier.HOST: 201 * MIB, Tier.DISK: 0}
    text = make_page(make_record(peak_bytes=peaks))
    assert "Memory passed a budget" in text
    assert "stayed within" not in text


@pytest.mark.usefixtures("words")
def test_a_peak_of_construction_is_not_called_one_of_the_steps() -> None:
    record = make_record(built_bytes={Tier.HOST: 160 * MIB, Tier.DISK: 300 * MIB})
    page = Page.of(make_page(record))
    words = "155.0 MiB in steps; before them at most 160.0 MiB"
    assert f"{words}, of a budget of 200.0 MiB" in page.text["facts"]
    assert f"Model state in RAM: {words} of a budget of 200.0 MiB (80%)" in page.text["run"]
    assert "Model state on NVMe: at most 310.0 MiB, without a budget" in page.text["run"]


@pytest.mark.usefixtures("words")
def test_a_budget_that_became_smaller_was_not_passed() -> None:
    peaks = {Tier.DEVICE: 0, Tier.HOST: 250 * MIB, Tier.DISK: 0}
    largest = {Tier.HOST: 256 * MIB}
    text = make_page(make_record(peak_bytes=peaks, largest_budget_bytes=largest))
    assert "Memory stayed within its budget" in text
    assert "of a budget of 256.0 MiB, 200.0 MiB at the end (98%)" in text


def test_a_budget_that_moved_is_drawn_as_it_was() -> None:
    moved = replace(
        sample(2.0), budget_bytes={Tier.DEVICE: None, Tier.HOST: 400 * MIB, Tier.DISK: None}
    )
    points = [point(1, samples=(moved,)), point(2, samples=(sample(4.0),))]
    host = draw_run(make_record(points=points)).axes[1]
    (budget,) = [line for line in host.lines if line.get_linestyle() == "--"]
    assert list(budget.get_ydata()) == [400, 400, 200]
    assert budget.get_drawstyle() == "steps-post"


@pytest.mark.usefixtures("words")
def test_losses_of_all_ranks_are_not_called_one_ranks() -> None:
    record = ranked()
    assert "(of rank 0)" in make_page(record)
    means = replace(record, facts=replace(record.facts, losses_are_means=True))
    assert "(of rank 0)" not in make_page(means)


def test_of_a_long_run_few_moments_are_drawn_and_no_peak_is_hidden() -> None:
    record = long()
    assert max(m.held for m in moments(record, Tier.HOST)) == 205 * MIB
    assert len(moments(record, Tier.HOST)) <= 300
    assert len(thinned(record.points, 300)) <= 300


def test_a_page_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.reporting.page.make_page", lambda record: "text")
    write_page(make_record(), tmp_path / "run.html")
    assert [p.name for p in tmp_path.iterdir()] == ["run.html"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_page(make_record(), tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "run.html"]
