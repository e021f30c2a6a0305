"""Gradients that become zero, and are not cleared, are zero on all ranks."""

from __future__ import annotations

import pytest

from tests.support.overlap import zeroing
from tests.support.ranks.processes import RankPool


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["all", "each"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zeros_replace_what_is_on_its_way_to_other_ranks(
    ranks2: RankPool, stage: int, how: str
) -> None:
    assert max(ranks2.run(zeroing.train, stage, how)) < 1e-5
