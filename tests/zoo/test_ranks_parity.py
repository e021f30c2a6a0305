"""Models of the zoo on 2 and 4 ranks, in every ZeRO stage, against DistributedDataParallel."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from tests.ranks import RankPool
from tests.zoo import handwritten, pretrained
from tests.zoo.rank_runs import both

pytestmark = pytest.mark.skipif(
    "zero_stage" not in {field.name for field in dataclasses.fields(hetero.Config)},
    reason="this hetero does not shard over ranks",
)

# What DDP cannot do itself: methods other than forward, reentrant checkpoints with unused
# parameters.
_NOT_WITH_DDP = {"other-methods", "checkpoint-reentrant", "checkpoint-nested-reentrant"}
CASES = {
    case.name: case
    for case in [*handwritten.CASES, *pretrained.CASES]
    if case.name not in _NOT_WITH_DDP
}
# Routed experts, sharing, use outside the owner, multi-slot chunks, frozen parameters, adapters,
# dropout and recomputation: what ranks could disagree about.
ALWAYS = {
    (2, "routed"),
    (2, "borrowed-head"),
    (2, "frozen"),
    (2, "large"),
    (2, "odd"),
    (2, "checkpoint"),
    (2, "batch-norm"),
    (2, "mixtral"),
    (2, "lora"),
    (4, "routed"),
    (4, "gpt2"),
}
STAGES = (1, 2, 3)


def matrix() -> list[Any]:
    """World size x case; all three stages are in one test, so that DDP runs once."""
    return [
        pytest.param(
            world,
            name,
            id=f"{world}-{name}",
            marks=() if (world, name) in ALWAYS else pytest.mark.extra,
        )
        for world in (2, 4)
        for name in CASES
    ]


def settings_of(nvme_path: Path) -> list[dict[str, Any]]:
    """Every stage in RAM, and one with state on disk."""
    return [
        *({"placement_policy": "cpu", "zero_stage": stage} for stage in STAGES),
        {
            "placement_policy": "nvme",
            "zero_stage": 3,
            "nvme_path": str(nvme_path),
        },
    ]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("world", "name"), matrix())
def test_as_with_ddp(
    world: int, name: str, accumulate: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Weights equal DDP's to the rounding of sums over ranks and micro-batches.

    Such a sum is rounded some 2 * world * accumulate <= 24 times by at most 2^-24 of it, in one
    order or the other: 3e-6 relatively. The update follows with a slope of at most lr / eps = 30,
    and gradients are below 1 here: within 1e-4 at the very worst. What is found is near 1e-8; 2e-6
    is less than a thousandth of one update (lr = 3e-3).
    """
    pool: RankPool = request.getfixturevalue(f"ranks{world}")
    settings = settings_of(tmp_path)
    ranks = pool.run(both, name, accumulate, settings)
    for expected, found in ranks:
        for options, run in zip(settings, found, strict=True):
            assert run.losses == pytest.approx(expected.losses, rel=1e-5), options
            assert run.norms == pytest.approx(expected.norms, rel=1e-5), options
            assert list(run.masters) == list(expected.masters)
            for key, master in run.masters.items():
                torch.testing.assert_close(
                    master,
                    expected.masters[key],
                    rtol=1e-5,
                    atol=2e-6,
                    msg=lambda text, key=key, options=options: f"{key} {options}: {text}",
                )
            for key, buffer in run.buffers.items():
                torch.testing.assert_close(buffer, expected.buffers[key], rtol=1e-5, atol=1e-5)
            assert len(set(run.losses)) > 1, "training moved"
    first = ranks[0][1]
    for _, found in ranks[1:]:
        for options, run, other in zip(settings, found, first, strict=True):
            assert run.norms == other.norms, options
            for key, master in run.masters.items():
                assert torch.equal(master, other.masters[key]), (key, options)
    # Where state lives changes no bit.
    for found in (found for _, found in ranks):
        for key, master in found[2].masters.items():
            assert torch.equal(master, found[3].masters[key]), key
