"""hetero/reporting/run_record: sums over steps, what bytes are for, the table, its dictionary."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.reporting.charts import draw_picture
from hetero.reporting.page import make_page
from hetero.reporting.run_record import LINKS, MemoryKind, PointList, rows, thinned
from hetero.text_table import columns
from offload.memory.tiers import Account, Tier
from tests.support.run_records import MIB, Page, make_record, point, sample, write_words


@given(st.integers(0, 200), st.integers(1, 200))
def test_a_long_run_keeps_few_points_and_the_one_that_held_most(steps: int, largest: int) -> None:
    found = PointList(most=8)
    for number in range(1, steps + 1):
        more = {"samples": (sample(4.0, 90 * MIB),)} if number == largest else {}
        found.add(point(number, **more))
    numbers = [p.last for p in found.points]
    assert len(numbers) <= 9
    assert numbers == sorted(set(numbers))
    assert not steps or (numbers[0] == 1 and numbers[-1] == steps)
    assert largest > steps // 2 or largest in numbers


def test_few_points_are_all_kept() -> None:
    points = [point(number) for number in range(1, 6)]
    assert thinned(points, 5) == points
    assert [p.last for p in thinned(points, 4)][::3] == [1, 5]


def test_the_file_on_nvme_is_told_apart_by_what_is_at_home_there() -> None:
    on_disk = {MemoryKind.GRAD: 50 * MIB, MemoryKind.OPTIM_STATE: 200 * MIB}
    found = sample(0.0).by_kind(Tier.DISK, on_disk)
    assert found == {**on_disk, MemoryKind.SPARE: 50 * MIB}
    # A file that is not written yet is smaller than what will be in it.
    small = replace(sample(0.0), managed_bytes={Tier.DISK: {Account.FILE: 60 * MIB}})
    found = small.by_kind(Tier.DISK, on_disk)
    assert found == {MemoryKind.GRAD: 50 * MIB, MemoryKind.OPTIM_STATE: 10 * MIB}


def test_kinds_are_all_of_a_tier() -> None:
    for tier in Tier:
        assert sum(sample(0.0).by_kind(tier, {}).values()) == sample(0.0).total(tier)


def test_the_first_step_is_not_steady_and_neither_is_one_after_a_move() -> None:
    record = make_record(steps=5)
    assert [p.last for p in record.steady] == [2, 3, 4, 5]
    assert record.tokens_per_s == 50
    moved = make_record(steps=5, changes=((3, "a budget changed"),))
    assert [p.last for p in moved.steady] == [5]
    assert [p.last for p in make_record(steps=1).steady] == [1]


def test_the_first_step_counts_only_where_there_is_no_other() -> None:
    record = make_record(3)
    assert record.tokens_per_s == pytest.approx(50.0)
    assert make_record(1).tokens_per_s == pytest.approx(10.0)
    moved = dict.fromkeys(LINKS, 0) | {"disk_read": 7 * MIB, "disk_write": MIB}
    assert record.bytes_per_step == moved


def test_dictionary_is_json_with_the_promised_keys() -> None:
    summary = json.loads(json.dumps(make_record(3).as_dict()))
    assert summary["losses"] == pytest.approx([5.0, 2.5, 5 / 3])
    assert summary["state_bytes"] == 160 * MIB
    assert summary["step_s"] == [10.0, 2.0, 2.0]
    assert summary["budget_bytes"]["host"] == 200 * MIB
    for key in ("params", "forward_s", "backward_s", "optimizer_s", "tokens_per_s",
                "peak_managed_bytes", "peak_rss_bytes", "bytes_per_step", "engine", "isa",
                "dtype", "policy", "model", "grad_norms", "steps", "run_dir", "ranks",
                "sent_bytes_per_step", "received_bytes_per_step"):  # fmt: skip
        assert key in summary
    assert (summary["update_s_per_step"], summary["update_wait_s_per_step"]) == (0.5, 0.125)


def test_a_run_without_steps_has_a_dictionary() -> None:
    found = make_record(0).as_dict()
    assert (found["tokens_per_s"], found["measured_over_predicted"]) == (0.0, None)


def test_table_tells_what_was_promised() -> None:
    record = make_record(3)
    table = dict(rows(record))
    assert table["plain PyTorch's model state"] == "160.0 MiB in RAM (16.8 bytes per parameter)"
    assert table["model state in RAM"] == "at most 160.0 MiB, of a budget of 200.0 MiB"
    assert not {"model state on the device", "ranks"} & set(table)
    assert table["step time, median"] == (
        "2.000 s: forward 0.500, backward 1.000, optimizer 0.250, rest 0.250"
    )
    assert table["updates"].endswith("0.125 of them waited for: overlap saved 0.375 s per step")
    assert table["loss"] == "at first 5, at last 1.667"
    record.status = "interrupted"
    record.facts = replace(record.facts, ranks=2)
    record.peak_rss_by_rank_bytes = [450 * MIB, 451 * MIB]
    table = dict(rows(record))
    assert table["steps"] == "3 of 3, interrupted"
    record.points = [replace(point, last=point.last + 4) for point in record.points]
    record.facts = replace(record.facts, planned_steps=7)
    assert dict(rows(record))["steps"] == "7 of 7 (3 of them now), interrupted"
    assert table["peak RSS of all ranks"] == "901.0 MiB, at most 451.0 MiB each"


def test_the_table_fits_the_terminal() -> None:
    lines = {width: columns(rows(make_record(3)), width) for width in (60, 80, 200)}
    assert all(max(map(len, found)) <= width for width, found in lines.items())
    words = [" ".join(found).split() for found in lines.values()]
    assert words[0] == words[1] == words[2]


def test_a_picture_has_some_size(tmp_path: Path) -> None:
    """Also of one step; the next test has one of many."""
    path = tmp_path / "figure.png"
    draw_picture(make_record(1), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1000
    assert height >= 800


def test_picture_page_and_table_have_the_same_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_words(monkeypatch)
    record = make_record(40)
    record.facts = replace(record.facts, process_bytes=475 * MIB)
    draw_picture(record, tmp_path / "figure.svg")
    picture = " ".join(Page.of((tmp_path / "figure.svg").read_text()).text.values())
    page = " ".join(Page.of(make_page(record)).text.values())
    table = " ".join(f"{label}: {value}" for label, value in rows(record))
    for words in (
        "at first 2.604, at last 0.13 (means of 4 steps)",
        "160.0 MiB",  # of plain PyTorch
        "at most 450.0 MiB",  # the process, by the kernel
        "475.0 MiB",  # its limit
        "of a budget of 200.0 MiB",
    ):
        assert words in picture, words
        assert words in page, words
        assert words in table, words
    for name, share in (("forward", 25), ("backward", 50), ("optimizer", 12)):
        seconds = record.part_s[name]
        for text in (picture, page):
            assert f"{name}: {seconds:.3g} s, {share}%" in text
        assert f"{name} {seconds:.3f}" in table
