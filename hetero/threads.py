"""How many threads the optimizer's updates and norms use."""

from __future__ import annotations

from collections.abc import Sequence

from offload import _native

_chosen = False  # by the user


def set_threads(count: int, cpus: Sequence[int] | None = None) -> None:
    """Size of the worker pool of this process, the calling thread included.

    Worker i runs on cpus[i % len(cpus)] alone, and the threads that compute an optimizer's step on
    cpus[(count - 1) % len(cpus)]; other callers stay where they are. None: all run where the kernel
    lets them. The default is the CPUs that this process may use, by its affinity and the quotas of
    its control groups, divided by the ranks on this machine. Raises ValueError for CPUs that this
    process cannot run on, with nothing changed.
    """
    global _chosen
    _native.set_threads(count, cpus)
    _chosen = True


def share_threads(local_ranks: int) -> None:
    """Sets the default for a rank that shares the machine."""
    if local_ranks > 1 and not _chosen:
        _native.set_threads(max(1, _native.usable_cpus() // local_ranks))
