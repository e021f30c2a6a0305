"""All checks of all facts, and their findings for people."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from hetero.cli.doctor.device_checks import check_collectives, check_devices, check_page_locking
from hetero.cli.doctor.facts import Facts
from hetero.cli.doctor.finding import Finding, Level
from hetero.cli.doctor.io_checks import check_folder, check_io_uring, check_locked_memory
from hetero.cli.doctor.memory_checks import (
    check_cpus,
    check_huge_pages,
    check_isa,
    check_memory_limit,
    check_numa,
)
from hetero.cli.doctor.software_checks import check_extras, check_versions
from hetero.text_table import columns, terminal_width

_COLOURS = {Level.OK: "32", Level.NOTE: "33", Level.PROBLEM: "1;31"}  # of ECMA-48
_LEVEL_WIDTH = 7


def examine(facts: Facts) -> list[Finding]:
    """The findings, in the order in which they are shown."""
    return [
        check_versions(facts.software),
        *check_extras(facts.software),
        check_cpus(facts.cpu),
        check_isa(facts.cpu),
        check_numa(facts.cpu),
        check_memory_limit(facts.memory),
        check_huge_pages(facts.memory),
        check_io_uring(facts.io_uring),
        check_locked_memory(facts.locked_memory),
        *(finding for folder in facts.folders for finding in check_folder(folder)),
        check_devices(facts.device),
        check_page_locking(facts.device),
        check_collectives(facts.device),
    ]


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each level."""
    counts = Counter(finding.level for finding in findings)
    parts = [(counts[Level.OK], "ok"), (counts[Level.NOTE], "note")]
    parts.append((counts[Level.PROBLEM], "problem"))
    return ", ".join(
        f"{count} {word}{'s' if word != 'ok' and count != 1 else ''}" for count, word in parts
    )


def lines(findings: Sequence[Finding], width: int) -> list[str]:
    """Plain text of at most `width` columns, as far as words allow."""
    rows = []
    for finding in findings:
        rows.append((finding.level.value.ljust(_LEVEL_WIDTH), finding.name, finding.fact))
        if finding.fix:
            rows.append(("", "", f"-> {finding.fix}"))
    return [*columns(rows, width), "", summary(findings)]


def show(findings: Sequence[Finding]) -> None:
    """Prints them on stdout, in colours where that is a terminal."""
    for line in lines(findings, terminal_width()):
        colour = next(
            (c for level, c in _COLOURS.items() if line.startswith(f"{level.value} ")), ""
        )
        if colour and sys.stdout.isatty():
            line = f"\033[{colour}m{line[:_LEVEL_WIDTH]}\033[0m{line[_LEVEL_WIDTH:]}"
        print(line)
