"""The smallest budget that works, as the refusal names it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import hetero


def smallest_host_memory(attempt: Callable[[], object]) -> int:
    """Bytes that the BudgetError of `attempt` (which must be refused) names."""
    with pytest.raises(hetero.BudgetError) as refusal:
        attempt()
    found = re.search(r"smallest that works is .*? \((\d+) bytes\)", str(refusal.value))
    assert found, refusal.value
    return int(found[1])
