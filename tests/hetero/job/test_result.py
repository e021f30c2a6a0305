"""Result, table and figure of runs that are made up, so that every number is known."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from hetero.reporting.charts import draw_picture
from hetero.reporting.page import make_page
from hetero.reporting.run_record import rows
from hetero.text_table import columns
from tests.support.run_records import Page
from tests.support.train_results import MIB, make_result


def test_the_first_step_counts_only_where_there_is_no_other() -> None:
    assert make_result(3).tokens_per_s == pytest.approx(50.0)
    assert make_result(1).tokens_per_s == pytest.approx(10.0)
    assert make_result(3).bytes_per_step == {
        "h2d": 0, "d2h": 0, "disk_read": round(7 * 2.5), "disk_write": 9, "sent": 5,
        "received": 5,
    }  # fmt: skip
    assert make_result(3).total_bytes["disk_read"] == 7 * (1 + 2 + 3)


def test_dictionary_is_json_with_the_promised_keys() -> None:
    summary = json.loads(json.dumps(make_result(3).as_dict()))
    assert summary["losses"] == pytest.approx([5.0, 2.5, 5 / 3])
    assert summary["state_bytes"] == 160_000_000
    assert summary["step_s"] == [10.0, 2.0, 2.0]
    assert summary["budget_bytes"]["host"] == 300 * MIB
    for key in ("params", "forward_s", "backward_s", "optimizer_s", "tokens_per_s",
                "peak_managed_bytes", "peak_rss_bytes", "bytes_per_step", "engine", "isa",
                "dtype", "policy", "model", "grad_norms", "steps", "run_dir", "ranks"):  # fmt: skip
        assert key in summary
    assert (summary["sent_bytes_per_step"], summary["received_bytes_per_step"]) == (5, 5)
    assert summary["gather_wait_s_per_step"] == 0.5
    assert (summary["update_s_per_step"], summary["update_wait_s_per_step"]) == (1.5, 0.25)


def test_a_run_without_steps_has_a_dictionary() -> None:
    found = make_result(0).as_dict()
    assert (found["tokens_per_s"], found["measured_over_predicted"]) == (0.0, None)


def test_table_tells_what_was_promised() -> None:
    table = dict(rows(make_result(3)))
    assert table["model"] == "tiny, 10,000,000 parameters"
    assert table["plain PyTorch's model state"] == "152.6 MiB in RAM (16 bytes per parameter)"
    assert table["model state in RAM"] == "at most 200.0 MiB, of a budget of 300.0 MiB"
    assert "model state on the device" not in table
    assert table["whole process (RSS)"] == "at most 900.0 MiB"
    assert table["step time, median"] == (
        "2.000 s: forward 0.500, backward 1.000, optimizer 0.250, rest 0.250"
    )
    assert table["updates"].endswith("0.250 of them waited for: overlap saved 1.250 s per step")
    assert table["moved per step"].startswith("NVMe read 18 B, NVMe written 9 B")
    assert table["loss"] == "at first 5, at last 1.667"
    stopped = make_result(3)
    stopped.status = "interrupted"
    assert dict(rows(stopped))["steps"] == "3 of 3, interrupted"


def test_the_table_fits_the_terminal() -> None:
    lines = {width: columns(rows(make_result(3)), width) for width in (60, 80, 200)}
    assert all(max(map(len, found)) <= width for width, found in lines.items())
    words = [" ".join(found).split() for found in lines.values()]
    assert words[0] == words[1] == words[2]


def test_table_of_several_ranks_tells_what_they_exchanged() -> None:
    assert "ranks" not in dict(rows(make_result(3)))
    table = dict(rows(make_result(3, ranks=2)))
    assert table["ranks"].startswith("2")
    assert "sent to other ranks 5 B, received from other ranks 5 B" in table["moved per step"]
    assert table["waited for other ranks' parameters"] == "0.500 s per step"
    assert table["peak RSS of all ranks"] == "1.8 GiB, at most 901.0 MiB each"


@pytest.mark.covering(1)
@pytest.mark.parametrize("steps", [1, 2, 40])
@pytest.mark.parametrize("budget", [None, 300 * MIB])
def test_figure_is_a_picture_of_some_size(tmp_path: Path, steps: int, budget: int | None) -> None:
    path = tmp_path / "figure.png"
    draw_picture(make_result(steps, budget), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1000
    assert height >= 800


def test_picture_page_and_table_have_the_same_figures(tmp_path: Path) -> None:
    result = make_result(40)
    result.facts = replace(result.facts, process_bytes=950 * MIB)
    draw_picture(result, tmp_path / "figure.svg")
    picture = " ".join(Page.of((tmp_path / "figure.svg").read_text()).text.values())
    page = " ".join(Page.of(make_page(result)).text.values())
    table = " ".join(f"{label}: {value}" for label, value in rows(result))
    for words in (
        "at first 2.604, at last 0.13 (means of 4 steps)",
        "152.6 MiB",  # of plain PyTorch
        "at most 900.0 MiB",  # the process, by the kernel
        "950.0 MiB",  # its limit
        "of a budget of 300.0 MiB",
    ):
        assert words in picture, words
        assert words in page, words
        assert words in table, words
    for name, share in (("forward", 25), ("backward", 50), ("optimizer", 12)):
        seconds = result.part_s[name]
        for text in (picture, page):
            assert f"{name}: {seconds:.3g} s, {share}%" in text
        assert f"{name} {seconds:.3f}" in table
