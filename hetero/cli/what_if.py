"""What a step would take with other budgets, or another disk: the same planning, asked again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetero.planning.candidates import SmallestBudgets
from hetero.planning.placement import PlacementError
from hetero.planning.report import seconds_text
from hetero.planning.step_cost import StepCost
from hetero.text_table import table
from offload.memory.sizes import format_bytes
from offload.profile.machine_profile import Profile

RAM, DEVICE, NVME_RATE = "RAM", "DEVICE", "NVMe bandwidth"  # bytes, bytes, bytes per second
_POINTS = 8  # budgets that are tried, beside the one that there is
_ROOM = 1.1  # times all state: with as much everything that can be there is
_NVME_RATES = ("nvme_read_bytes_per_s", "nvme_write_bytes_per_s", "nvme_mixed_bytes_per_s")
_DISK_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Case:
    """A budget that is another one, all else being equal.

    Attributes:
        of: RAM, DEVICE or NVME_RATE.
        value: bytes, or bytes per second that the disk reads.
        is_given: this is what there is.
        step: the step that is predicted; None: nothing fits.
    """

    of: str
    value: float
    is_given: bool
    step: StepCost | None

    def as_dict(self) -> dict[str, object]:
        """For programs."""
        found = dict.fromkeys(("step_s", "bound", "nvme_read_bytes", "nvme_written_bytes"))
        if (step := self.step) is not None:
            moved = step.traffic["nvme_read"], step.traffic["nvme_written"]
            found = dict(zip(found, (step.seconds, step.bound, *moved), strict=True))
        return {"of": self.of, "value": self.value, "is_given": self.is_given, **found}

    @property
    def words(self) -> str:
        """The value as people write it."""
        text = format_bytes(self.value)
        return f"{text}/s" if self.of == NVME_RATE else text


def other_budgets(
    step_with: Callable[[int, int | None], StepCost],
    given: tuple[int, int | None],
    least: SmallestBudgets,
    state_bytes: int,
) -> list[Case]:
    """Cases of RAM, and of DEVICE where that is not RAM: from the least to enough for all state.

    Args:
        step_with: predicts a step with so many bytes of RAM and of DEVICE; raises PlacementError.
        given: the budgets that there are, of RAM and of DEVICE (None: DEVICE is RAM).
        least: the smallest that work, each beside what is given of the other.
        state_bytes: what all state takes, pools included.
    """
    found = []
    for place, (of, smallest) in enumerate(((RAM, least["host"]), (DEVICE, least["device"]))):
        now = given[place]
        for nbytes in [] if now is None else _ladder(smallest or 0, state_bytes, now):
            host, device = (nbytes, given[1]) if of == RAM else (given[0], nbytes)
            try:
                step = step_with(host, device)
            except PlacementError:
                step = None
            found.append(Case(of, nbytes, nbytes == now, step))
    return found


def other_disks(step_with: Callable[[Profile], StepCost], profile: Profile) -> list[Case]:
    """Cases of NVMe that is faster or slower than the profile's, reading and writing alike."""
    found = []
    for factor in _DISK_FACTORS:
        rates = {name: getattr(profile, name) * factor for name in _NVME_RATES}
        step = step_with(replace(profile, **rates))
        found.append(Case(NVME_RATE, rates["nvme_read_bytes_per_s"], factor == 1.0, step))
    return found


def explain_cases(cases: Sequence[Case], width: int | None = None) -> str:
    """A table for people; the steps are compared with the given one."""
    rows: list[tuple[str, ...]] = [
        ("what if there were", "", "expected step", "compared", "bound by", "NVMe read", "written")
    ]
    now_s = next(case.step.seconds for case in cases if case.is_given and case.step is not None)
    for case in cases:
        name = f"NVMe of {case.words}" if case.of == NVME_RATE else f"{case.words} of {case.of}"
        cells = ["nothing fits", "", "", "", ""]
        if (step := case.step) is not None:
            compared = f"{step.seconds / now_s:.0%}" if now_s else "-"
            moved = (step.traffic["nvme_read"], step.traffic["nvme_written"])
            cells = [f"{seconds_text(step.seconds)} s", compared, step.bound]
            cells += [format_bytes(n) if n else "-" for n in moved]
        rows.append((name, "given" if case.is_given else "", *cells))
    return table(rows, width)


def _ladder(least: int, most: int, given: int) -> list[int]:
    """Budgets in ascending order, as far from one another, and the given one."""
    low, high = max(1, least), max(int(most * _ROOM), least + 1)
    steps = (low + (high - low) * i // (_POINTS - 1) for i in range(_POINTS))
    return sorted({*steps, given})
