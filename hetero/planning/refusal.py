"""Why no placement fits, in words with the smallest budgets that work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from hetero.config import FIRST_STATE_SHARE
from hetero.planning.placement import Budgets, GroupSpec, Placement, PlacementError
from offload.memory.sizes import format_bytes, round_up
from offload.memory.tiers import Tier


def closest(tried: Sequence[Placement], budgets: Budgets) -> Placement:
    """The one that misses least, so that the numbers in the refusal are true to the byte."""
    if not budgets.disk:
        tried = [p for p in tried if not p.disk_bytes] or tried
    if budgets.device is not None:
        on_device = [p for p in tried if p.device_bytes <= (budgets.device or 0)]
        least = min(p.device_bytes for p in tried)
        tried = on_device or [p for p in tried if p.device_bytes == least]
    in_host = [p for p in tried if p.host_bytes <= budgets.host]
    if in_host:
        return min(in_host, key=lambda p: (max(p.disk_bytes, budgets.disk), p.host_bytes))
    return min(tried, key=lambda p: p.host_bytes)


def words(smallest: Placement, spec: GroupSpec) -> str:
    """Which budgets of `spec` are too small for the placement `smallest`, and what helps."""
    budgets, policy, layout = spec.budgets, spec.policy, spec.layout
    parts = [
        f"policy {policy!r} cannot hold {layout.numel:,} parameters in "
        f"{len(layout.chunks)} chunks of {layout.slot_numel:,} elements:"
    ]
    if budgets.taken_host or budgets.taken_disk:
        parts.append(
            f"other parameters of this model take {format_bytes(budgets.taken_host)} of RAM and "
            f"{format_bytes(budgets.taken_disk)} of disk;"
        )
    if budgets.reserved_host:
        parts.append(f"reserve_memory is {format_bytes(budgets.reserved_host)} of RAM;")
    if budgets.activations_host:
        parts.append(f"activation_memory is {format_bytes(budgets.activations_host)} of RAM;")
    if smallest.host_bytes > budgets.host:
        parts.append(
            f"host_memory is {_exact(budgets.host)}, and the smallest that works is "
            f"{_exact(smallest.host_bytes)};"
        )
    if smallest.disk_bytes > budgets.disk:
        what = "nvme_path is not given, so disk space"
        if budgets.disk:
            what = "nvme_capacity or the free space there"
        parts.append(
            f"{what} is {format_bytes(budgets.disk)}, and with that much RAM "
            f"{_exact(smallest.disk_bytes)} go to disk;"
        )
    if budgets.device is not None and smallest.device_bytes > budgets.device:
        parts.append(
            f"device_memory is {_exact(budgets.device)}, and the smallest that works is "
            f"{_exact(smallest.device_bytes)};"
        )
    gathered = budgets.taken_gathered + smallest.gathered_slots * spec.slot.gathered
    if budgets.gathered is not None and gathered > budgets.gathered:
        parts.append(
            f"device_memory is {format_bytes(budgets.gathered)}, and gathered parameters need "
            f"{_exact(gathered)};"
        )
    fixes = "raise host_memory, or set a smaller chunk_numel"
    if policy == "cpu":
        fixes = "raise host_memory, or use placement_policy='nvme' or 'auto' with nvme_path"
    elif not budgets.disk:
        fixes = "give nvme_path, or raise host_memory"
    if budgets.disk and smallest.disk_bytes > budgets.disk and smallest.host_bytes <= budgets.host:
        fixes = "free space there, or raise nvme_capacity or host_memory"
    if not budgets.under_construction and smallest.host_bytes > budgets.host:
        reserve = smallest.host_bytes - budgets.taken_host - budgets.activations_host
        fixes = (
            f"initialize with reserve_memory={reserve} or more, "
            f"of host_memory, which is then left for parameters that come later"
        )
    return " ".join([*parts, fixes])


_MARGIN = 64  # one part in so many more is asked for: a process never holds the same twice

# Whose memory a limit is of, and the budget that gives way.
SAID = {Tier.HOST: ("process", "host_memory"), Tier.DEVICE: ("device", "device_memory")}


def too_much(tier: Tier, limit: int, needed: int, left: int, refusal: PlacementError) -> str:
    """What is to be said if no placement of what is `left` on `tier` by a limit will do."""
    least, name, fix = refusal.smallest_host_bytes, "process_memory", "raise process_memory, or"
    if tier is Tier.DEVICE:
        least = refusal.smallest_device_bytes
        name, fix = "what the device may hold altogether", "free what else is there, or"
    return (
        f"{name} is {_exact(limit)}, and a step needs {format_bytes(needed)} for "
        f"activations, temporaries and libraries; that leaves "
        f"{format_bytes(max(0, left))} for model state, and the smallest that works is "
        f"{_exact(least)}; {fix} use smaller or checkpointed micro-batches (this step was made: do "
        f"not make it again)"
    )


def process_too_small(
    limit: int, is_auto: bool, beside: int, host: int, what: str, least: int
) -> str | None:
    """What is to be said if a process with `beside` bytes of other things has no room for state.

    None if its limit leaves more than the budget of RAM, which then is too small by itself.

    Args:
        limit: of the whole process, in bytes.
        is_auto: it is the system's limit, and not the user's.
        beside: bytes that the process held before it had model state.
        host: the budget of RAM.
        what: the part of model state that does not fit.
        least: bytes which that part takes.
    """
    left = max(0, int((limit - beside) * FIRST_STATE_SHARE))
    if host < left:
        return None
    needed = beside + ceil(least / FIRST_STATE_SHARE)
    smallest = round_up(needed + needed // _MARGIN, 1 << 20)
    name, fix = "process_memory", "raise process_memory"
    if is_auto:
        name, fix = (
            "process_memory='auto', the system's limit,",
            "raise that limit (cgroup, ulimit)",
        )
    return (
        f"{name} is {_exact(limit)}, and without model state the process holds "
        f"{format_bytes(beside)}; {FIRST_STATE_SHARE} of the rest, {format_bytes(left)}, may "
        f"become model state before the first step, and {what} takes {_exact(least)}; {fix} to "
        f"{_exact(smallest)} at least"
    )


def process_passed(limit: int, peak: int, when: str) -> str:
    """What is to be said of a process that held `peak` bytes at a time, more than it may."""
    needed = round_up(peak + peak // _MARGIN, 1 << 20)
    return (
        f"the process passed process_memory {when}: it held {_exact(peak)}, by the kernel's count, "
        f"and may hold {_exact(limit)}; raise process_memory to {_exact(needed)}, or use smaller "
        f"or checkpointed micro-batches"
    )


def cannot_become(
    wanted: Mapping[Tier, int], budgets: Budgets, policy: str, refusal: PlacementError
) -> str:
    """What is to be said if no placement fits the budgets that a user wants."""
    least = {Tier.DEVICE: refusal.smallest_device_bytes, Tier.HOST: refusal.smallest_host_bytes}
    said = {t: f"{t.value}_memory cannot become {_exact(n)}" for t, n in wanted.items()}
    for tier, smallest in least.items():
        if tier in wanted and smallest > wanted[tier]:
            return (
                f"{said[tier]}: the smallest that works is {_exact(smallest)}, under policy "
                f"{policy!r}, with {format_bytes(budgets.disk)} of NVMe"
            )
    # It is the disk, or the budget that stays.
    return f"{' and '.join(said.values())}: {refusal}"


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"
