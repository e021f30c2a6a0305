"""grad_reduce="backend": the process group's reduce-scatter makes the means."""

from __future__ import annotations

import pytest
import torch

from tests.support.gathering.deviating import reduced
from tests.support.ranks.processes import RankPool


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_means_are_those_of_the_own_sum_but_for_rounding(
    ranks2: RankPool, stage: int, dtype: str
) -> None:
    """Of two ranks the sum has one rounding either way, in fp32."""
    options = {"zero_stage": stage, "dtype": dtype, "grad_dtype": "fp32"}
    wanted = ranks2.run(reduced, options)
    found = ranks2.run(reduced, options | {"grad_reduce": "backend"})
    assert all(map(torch.equal, found[0], found[1]))
    for mine, right in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0 if dtype == "fp32" else 1e-6)


def test_four_ranks_have_the_same_values(ranks4: RankPool) -> None:
    found = ranks4.run(reduced, {"zero_stage": 2, "grad_reduce": "backend"})
    wanted = ranks4.run(reduced, {"zero_stage": 2})
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    for mine, right in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-6)
