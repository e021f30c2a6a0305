"""The errors a user can meet. Each message names the thing, the fact with numbers, and the fix."""

from __future__ import annotations


class HeteroError(Exception):
    """Base of all errors of this project."""


class BudgetError(HeteroError):
    """A memory budget cannot hold what is needed."""


class StoreError(HeteroError, OSError):
    """The NVMe file cannot be made or used."""


class UnmanagedParameterError(HeteroError, ValueError):
    """A parameter that no engine manages was given where a managed one is needed."""


class ClosedError(HeteroError, RuntimeError):
    """The engine was closed."""


class StaleGraphError(HeteroError, RuntimeError):
    """A backward needs parameters as they were before an optimizer step."""


class NonFiniteError(HeteroError, ArithmeticError):
    """A loss or gradient is infinite or not a number."""


class PeerError(HeteroError, ConnectionError):
    """Another rank failed, is gone, or does not do what all ranks must do together."""


class CheckpointError(HeteroError):
    """A checkpoint, or a file of one, cannot be read or written as it is."""
