"""What hetero aims at on a GPU, and the figure of each aim in a run of bench.cuda."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.kernels.cuda_copies import WAYS

LIMITED_MODEL = "gpt-14b"
LIMITED_DEVICE_BYTES = 80_000_000_000
LIMITED_RAM_BYTES = 128 << 30

_LEAST_LINK_SHARE = 0.9
_LEAST_OF_MEMORY = 0.9
_MOST_OF_BOUND = 1.15
_LEAST_AT_A_QUARTER = 0.9
_UPDATE_BYTES = 26  # of RAM that the CPU's update of a parameter reads and writes
_GRAD_BYTES = 2  # of it that come from the device
_LEAST_OF_DEEPSPEED = 2.0
_WAY_WORDS = {"h2d": "H2D", "d2h": "D2H", "d2h_added": "D2H, added"}


@dataclass(frozen=True)
class Aim:
    """One figure, a ratio, beside what it is to be."""

    what: str
    figure: float | None  # None: `note` says why there is none
    bound: float
    at_least: bool  # else at most
    note: str = ""

    def met(self) -> bool | None:
        """None without a figure."""
        if self.figure is None:
            return None
        return self.figure >= self.bound if self.at_least else self.figure <= self.bound

    def line(self) -> str:
        """As the table has it."""
        figure = "-" if self.figure is None else f"{self.figure:.2f}"
        verdict = {None: "", True: "met", False: "MISSED"}[self.met()]
        sign = ">=" if self.at_least else "<="
        line = f"{self.what:<58} {figure:>6} {sign} {self.bound:<4.2f} {verdict:<6} {self.note}"
        return line.rstrip()


def aims(
    rows: Sequence[Mapping[str, Any]], copies: Mapping[str, Any], disk_bytes_per_s: float | None
) -> list[Aim]:
    """All aims.

    Args:
        rows: bench.cuda's.
        copies: of measure_copies() and measure_updates(), with a "status" of "ok", or with another
            status alone.
        disk_bytes_per_s: What the scratch directory's disk moves, read and written together; None
            if there is none, or it was not measured.
    """
    found = [_of_link(way, copies) for way in WAYS]
    found.append(_of_update(copies))
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = {row["contender"]: row for row in rows if row["model"] == model}
        if model == LIMITED_MODEL:
            found.append(_of_limited(of_model))
            continue
        shares = [kind for kind in of_model if kind.isdigit()]
        found += [_of_step(model, kind, of_model, copies, disk_bytes_per_s) for kind in shares]
        what = f"{model}: tokens/s with 25 % of the state on the GPU, of 100 %"
        found.append(_of_speeds(what, of_model, "25", "100", _LEAST_AT_A_QUARTER))
        what = f"{model}: tokens/s with 10 %, of DeepSpeed's offload"
        found.append(_of_speeds(what, of_model, "10", "deepspeed", _LEAST_OF_DEEPSPEED))
    return found


def _of_link(way: str, copies: Mapping[str, Any]) -> Aim:
    what = f"{_WAY_WORDS[way]}: bytes/s, of the link alone"
    if copies["status"] != "ok":
        return Aim(what, None, _LEAST_LINK_SHARE, True, copies["status"])
    alone = copies[f"{way[:3]}_alone"]
    note = f"{copies[way] / 1e9:.1f} of {alone / 1e9:.1f} GB/s"
    return Aim(what, copies[way] / alone, _LEAST_LINK_SHARE, True, note)


def _of_update(copies: Mapping[str, Any]) -> Aim:
    what = "the CPU's Adam: bytes/s, of memory's alone"
    if copies["status"] != "ok":
        return Aim(what, None, _LEAST_OF_MEMORY, True, copies["status"])
    gb = {name: copies[name] / 1e9 for name in ("update", "memory", "update_beside", "both")}
    note = (
        f"{gb['update']:.0f} of {gb['memory']:.0f} GB/s; {gb['update_beside']:.0f} while the link "
        f"moves {gb['both']:.0f} GB/s each way"
    )
    return Aim(what, gb["update"] / gb["memory"], _LEAST_OF_MEMORY, True, note)


def _of_step(
    model: str,
    kind: str,
    of_model: Mapping[str, Mapping[str, Any]],
    copies: Mapping[str, Any],
    disk_bytes_per_s: float | None,
) -> Aim:
    """Compute is the step with all state on the GPU, so that of 100 % it is the step itself."""
    what = f"{model}: step with {kind} %, of the slowest part"
    missing = [
        f"{name}: {status}"
        for name, status in (
            (f"{kind} %", of_model[kind]["status"]),
            ("100 %", of_model.get("100", {"status": "not run"})["status"]),
            ("link", copies["status"]),
        )
        if status != "ok"
    ]
    row = of_model[kind]
    if not missing and row["disk_bytes"] and disk_bytes_per_s is None:
        missing.append("NVMe: not measured")
    if missing:
        return Aim(what, None, _MOST_OF_BOUND, False, "; ".join(missing))
    h2d_s = row["h2d_bytes"] / copies["h2d_alone"]
    d2h_s = row["d2h_bytes"] / copies["d2h_alone"]
    bounds_s = {"compute": of_model["100"]["step_s"], "link": max(h2d_s, d2h_s)}
    # (Without gradients that are accumulated each crosses the link once.)
    updated_bytes = row["d2h_bytes"] / _GRAD_BYTES * _UPDATE_BYTES
    bounds_s["update"] = updated_bytes / copies["update"]
    if row["disk_bytes"] and disk_bytes_per_s is not None:
        bounds_s["NVMe"] = row["disk_bytes"] / disk_bytes_per_s
    slowest = max(bounds_s, key=lambda name: bounds_s[name])
    note = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in bounds_s.items())
    return Aim(what, row["step_s"] / bounds_s[slowest], _MOST_OF_BOUND, False, note)


def _of_speeds(
    what: str, of_model: Mapping[str, Mapping[str, Any]], one: str, other: str, least: float
) -> Aim:
    for kind in (one, other):
        status = of_model.get(kind, {"status": "not run"})["status"]
        if status != "ok":
            name = f"{kind} %" if kind.isdigit() else kind
            return Aim(what, None, least, True, f"{name}: {status}")
    speeds = [of_model[kind]["tokens_per_s"] for kind in (one, other)]
    note = f"{speeds[0]:,.0f} of {speeds[1]:,.0f} tokens/s"
    return Aim(what, speeds[0] / speeds[1], least, True, note)


def _of_limited(of_model: Mapping[str, Mapping[str, Any]]) -> Aim:
    what = f"{LIMITED_MODEL}: memory, of a GPU of 80 GB and 128 GiB of RAM"
    row = of_model.get("80gb", {"status": "not run"})
    if row["status"] != "ok":
        return Aim(what, None, 1.0, False, row["status"])
    device, ram = row["device_reserved_bytes"], row["rss_peak_bytes"]
    note = f"{device / 1e9:.1f} GB, {ram / 2**30:.1f} GiB, {row['tokens_per_s']:,.0f} tokens/s"
    share = max(device / LIMITED_DEVICE_BYTES, ram / LIMITED_RAM_BYTES)
    return Aim(what, share, 1.0, False, note)
