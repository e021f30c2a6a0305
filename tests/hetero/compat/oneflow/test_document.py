"""OneFlow's document of ZeRO on two ranks, with each stage, beside plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.support.compat.oneflow import expected, run_on_a_rank
from tests.support.ranks.processes import RankPool


@pytest.fixture(scope="module")
def wanted() -> tuple[list[torch.Tensor], torch.Tensor]:
    return expected()


@pytest.mark.parametrize(
    ("enable", "stage"),
    [
        ("self.config.enable_zero(True, stage=3)", 3),
        ("self.config.set_zero_redundancy_optimizer_mode()", 1),
    ],
)
def test_the_document(
    enable: str, stage: int, ranks2: RankPool, wanted: tuple[list[torch.Tensor], torch.Tensor]
) -> None:
    """After training the model and a graph without optimizer infer, with nothing configured."""
    weights, inferred = wanted
    for found in ranks2.run(run_on_a_rank, enable):
        assert found["stage"] == stage
        for mine, weight in zip(found["weights"], weights, strict=True):
            torch.testing.assert_close(mine, weight, rtol=1e-5, atol=1e-6)
        for mine in found["inferred"]:
            torch.testing.assert_close(mine, inferred, rtol=1e-5, atol=1e-5)
