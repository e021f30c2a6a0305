"""Checks of RAM and processors."""

from __future__ import annotations

from hetero.cli.doctor.facts import CpuFacts, MemoryFacts
from hetero.cli.doctor.finding import Finding, note, ok
from offload.memory.sizes import format_bytes


def check_memory_limit(facts: MemoryFacts) -> Finding:
    """Whether a control group gives this process less than the machine has."""
    name, ram = "memory", format_bytes(facts.ram_bytes)
    version = facts.cgroup_version
    groups = "no control groups" if version is None else f"control groups version {version}"
    said = f"{ram} of RAM, {format_bytes(facts.available_bytes)} of it available"
    if facts.allowed_bytes is None or facts.allowed_bytes >= facts.ram_bytes:
        return ok(name, f"{said}, all of it allowed ({groups})")
    return note(
        name,
        f"{said}, but this process is ended if it takes more than"
        f" {format_bytes(facts.allowed_bytes)} ({groups}, or ulimit -v)",
        "keep within it: hetero train --process-memory auto",
    )


def check_huge_pages(facts: MemoryFacts) -> Finding:
    """Whether hetero's memory can be in huge pages, which it asks for by madvise()."""
    name, chosen = "huge pages", facts.huge_pages
    if chosen in ("always", "madvise"):
        return ok(name, f"transparent huge pages: {chosen}")
    what = "this kernel has no transparent huge pages" if chosen is None else f"set to {chosen!r}"
    return note(
        name,
        f"{what}: updates and transfers take more time for addresses",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def check_cpus(facts: CpuFacts) -> Finding:
    """How many processors updates run on."""
    return ok(
        "processors",
        f"{facts.usable_cpus} of {facts.cpus} CPUs ({facts.architecture}), by affinity and quota",
    )


def check_isa(facts: CpuFacts) -> Finding:
    """Which instruction set the update kernels use."""
    name, best = "update kernels", facts.available_isas[0]
    said = f"{facts.isa} (this machine and build have {', '.join(facts.available_isas)})"
    if facts.isa != best:
        cause = "HETERO_ISA" if facts.forced_isa else "set_isa()"
        return note(name, f"{said}; {cause} chose it", "unset HETERO_ISA")
    if best == "scalar":
        return note(
            name,
            f"{said}: this build has no vector kernels for this {facts.architecture}",
            "updates are slow here; use a machine with AVX2, AVX-512 or NEON",
        )
    return ok(name, said)


def check_numa(facts: CpuFacts) -> Finding:
    """Whether memory can be spread over the nodes whose CPUs compute it."""
    name = "NUMA"
    if facts.numa_nodes < 2:
        return ok(name, "one node")
    if facts.memory_policy:
        return ok(name, f"{facts.numa_nodes} nodes; memory is spread over them")
    return note(
        name,
        f"{facts.numa_nodes} nodes, but this process may not choose where its memory lies",
        "in a container: docker run --cap-add SYS_NICE",
    )
