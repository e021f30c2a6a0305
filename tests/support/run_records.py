"""Records of runs that are made up, so that every number is known, and what a page of one has."""

from __future__ import annotations

import html
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from hetero.reporting.run_record import (
    LINKS,
    MemoryKind,
    MemorySample,
    RunFacts,
    RunRecord,
    StepPoint,
)
from offload.memory.tiers import Account, Tier
from offload.timeline import Interval, Sample, Timeline

MIB = 1 << 20
GRAD, OPTIM_STATE = MemoryKind.GRAD, MemoryKind.OPTIM_STATE
VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}


def sample(at_s: float, activations: int = 20 * MIB) -> MemorySample:
    """155 MiB of RAM and 300 MiB of NVMe with the activations that are there otherwise."""
    ram = {
        Account.PARAM: 100 * MIB,
        Account.GATHERED: 5 * MIB,
        Account.BUFFER: 30 * MIB,
        Account.ACTIVATION: activations,
    }
    managed = {Tier.DEVICE: {}, Tier.HOST: ram, Tier.DISK: {Account.FILE: 300 * MIB}}
    budgets = {Tier.DEVICE: None, Tier.HOST: 200 * MIB, Tier.DISK: None}
    return MemorySample(at_s, managed, budgets, 0, 400 * MIB)


def point(last: int, **changed: Any) -> StepPoint:
    """A step of 2 s (the first one 10 s) with 100 tokens."""
    made: dict[str, Any] = {
        "last": last,
        "loss": 5.0 / last,
        "seconds": 10.0 if last == 1 else 2.0,
        "parts_s": {"forward": 0.5, "backward": 1.0, "optimizer": 0.25},
        "tokens": 100,
        "traffic_bytes": dict.fromkeys(LINKS, 0) | {"disk_read": 7 * MIB, "disk_write": MIB},
        "gather_wait_s": 0.0,
        "update_s": 0.5,
        "update_wait_s": 0.125,
        "samples": (sample(2.0 * last + 7), sample(2.0 * last + 8, 0)),
        "on_disk": {GRAD: 50 * MIB, OPTIM_STATE: 200 * MIB},
    }
    return StepPoint(**made | changed)


def timeline() -> Timeline:
    """Of one step of 4 s: 1 s of 2 s of reading is hidden behind forward."""
    intervals = (
        Interval("compute", 0.0, 2.0, name="forward"),
        Interval("compute", 2.5, 3.5, name="backward"),
        Interval("compute", 3.5, 4.0, name="optimizer"),
        Interval("nvme_read", 1.0, 2.0, 4 * MIB),
        Interval("nvme_read", 3.5, 4.0, 2 * MIB),
        Interval("update", 3.5, 4.0, 6 * MIB),
    )
    return Timeline(0.0, 4.0, intervals, samples=(Sample("RAM", 0.0, {"param": 5}),))


def make_record(steps: int = 5, **changed: Any) -> RunRecord:
    """A run within 160 of 200 MiB of RAM, whose optimizer state is on NVMe."""
    none = {"PARAM": 0, "GRAD": 0, "OPTIM_STATE": 0, "pools": 0}
    made: dict[str, Any] = {
        "facts": RunFacts(
            title="tiny <net> & co",
            params=10_000_000,
            plain_bytes=160 * MIB,
            plain_tier=Tier.HOST,
            dtype="bf16",
            policy="nvme",
            rows=(("data", 'a "text"'),),
            planned_steps=steps,
            about={"engine": "threads", "isa": "avx2"},
            budget_bytes={"device": None, "host": 200 * MIB, "disk": None},
        ),
        "points": [point(number) for number in range(1, steps + 1)],
        "budget_bytes": {Tier.DEVICE: None, Tier.HOST: 200 * MIB, Tier.DISK: None},
        "peak_bytes": {Tier.DEVICE: 0, Tier.HOST: 160 * MIB, Tier.DISK: 310 * MIB},
        "peak_rss_bytes": 450 * MIB,
        "homes": {
            Tier.DEVICE: none,
            Tier.HOST: none | {"PARAM": 100 * MIB, "GRAD": 5 * MIB, "pools": 35 * MIB},
            Tier.DISK: none | {"GRAD": 50 * MIB, "OPTIM_STATE": 200 * MIB},
        },
        "predicted": {
            "step_s": 1.0,
            "phases_s": {"forward": 0.25, "backward": 0.5, "update": 0.25},
            "bound": "NVMe",
            "measured_computing": True,
            "nvme_read_bytes": 14 * MIB,
            "nvme_written_bytes": MIB,
        },
        "timeline": timeline(),
        "notes": ("a note",),
    }
    return RunRecord(**made | changed)


def write_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has pages show the words of their charts alone: laying a chart out takes half a second."""

    def words(figure: Figure, name: str, finding: str) -> str:
        found = "\n".join(str(each.get_text()) for each in figure.findobj(Text))
        return f"<svg>{html.escape(found)}</svg>"

    monkeypatch.setattr("hetero.reporting.page.as_svg", words)


@dataclass
class Page(HTMLParser):
    """What a page has: its elements, its text by section, and what it refers to."""

    tags: Counter[str] = field(default_factory=Counter)
    ids: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str]] = field(default_factory=list)
    text: dict[str, str] = field(default_factory=dict)
    unclosed: list[str] = field(default_factory=list)
    _section: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def of(cls, text: str) -> Page:
        """Raises AssertionError for an end without a beginning, or a beginning without an end."""
        page = cls()
        page.feed(text)
        page.close()
        assert not page.unclosed, page.unclosed
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self.unclosed.append(tag)
        for name, value in attrs:
            self.attributes.append((name, value or ""))
            if name == "id":
                self.ids.append(value or "")
                if tag in ("section", "table", "div"):
                    self._section = value or ""
            if name in ("src", "href", "xlink:href", "data", "srcset", "action", "poster"):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed, tag
        assert self.unclosed[-1] == tag, (self.unclosed, tag)
        self.unclosed.pop()

    def handle_data(self, data: str) -> None:
        self.text[self._section] = self.text.get(self._section, "") + data
