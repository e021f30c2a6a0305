"""How many threads the optimizer's updates and norms use."""

from __future__ import annotations

from offload import _native
from offload.cgroups import usable_cpus

_chosen = False  # whether the user has set the number of threads


def set_threads(count: int) -> None:
    """Sets the size of this process's worker pool, which makes optimizer updates and norms.

    By default it has as many threads as this process may use CPUs, divided by the ranks on this
    machine. Fewer leave CPUs to data loading.

    Args:
        count: threads, the calling one included.

    Raises:
        ValueError: count is not positive.
    """
    global _chosen
    _native.set_threads(count)
    _chosen = True


def lacking_threads() -> list[str]:
    """Starts the pool's threads; a note if the system has no room for all of them."""
    wanted, running = _native.threads(), _native.start_threads()
    if running == wanted:
        return []
    return [
        f"{running} of {wanted} threads make updates and norms, because the limit of processes "
        "(ulimit -u, pids.max) is reached"
    ]


def share_threads(local_ranks: int) -> None:
    """Sets the default for one of `local_ranks` that share the machine; the user's choice stays."""
    if not _chosen:
        _native.set_threads(max(1, usable_cpus() // local_ranks))
