"""Models of the zoo on 2 and 4 ranks, in every ZeRO stage, against DistributedDataParallel.

Not a bit differs if DDP averages in fp32, in the ranks' order, rounding once, as hetero documents
it. That this is a mean is shown beside DDP's own, to a tolerance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.processes import RankPool
from tests.zoo.rank_runs import CASES, both, one_sided_parts
from tests.zoo.runs import Run, assert_same_bits

# What DDP cannot do itself: methods other than forward, reentrant checkpoints with unused
# parameters.
_NOT_WITH_DDP = {"other-methods", "checkpoint-reentrant", "checkpoint-nested-reentrant"}
WITH_DDP = {name: case for name, case in CASES.items() if name not in _NOT_WITH_DDP}
# Routed experts, sharing, use outside the owner, multi-slot chunks, frozen parameters, adapters and
# dropout: what ranks could disagree about. (Recomputation and batch norms are below.)
ALWAYS = {
    (2, "routed", "bf16", 2),
    (2, "borrowed-head", "bf16", 2),
    (2, "odd", "bf16", 2),
    (2, "lora", "fp32", 1),
    (2, "tiled-tied", "bf16", 1),
}
# Whose parameters get their gradients in another order than that of their chunks: in the least RAM
# that initialize() asks for, buckets run out.
OUT_OF_ORDER = {
    *("bare", "checkpoint", "checkpoint-nested", "embeddings", "large", "llama"),
    *("mamba", "mixtral", "odd", "opt", "recurrent", "returned-bias", "structured", "t5", "vit"),
}
# Tested in the least RAM by tests of their own; one gathered copy is too few for `functional`.
NOT_IN_LEAST_MEMORY = OUT_OF_ORDER | {"routed", "functional"}
STAGES = (1, 2, 3)


def matrix() -> list[Any]:
    """World size, case, dtype, micro-batches; all stages are in one test, so that DDP runs once."""
    return [
        pytest.param(
            *row,
            id="-".join(map(str, row)),
            marks=() if row in ALWAYS else pytest.mark.extra,
        )
        for row in (
            (world, name, dtype, accumulate)
            for world in (2, 4)
            for name, case in WITH_DDP.items()
            for dtype in case.dtypes
            for accumulate in (1, 2)
        )
    ]


def on_disk(nvme_path: Path) -> dict[str, Any]:
    """All state on disk, with the least RAM that works."""
    return {"placement_policy": "nvme", "zero_stage": 3, "nvme_path": str(nvme_path)}


Ranks = list[list[tuple[Run, Run]]]  # by DDP and by hetero, for each of the settings


def assert_close(ranks: Ranks, settings: list[dict[str, Any]]) -> None:
    """In fp32 every rank's runs are as by DDP, and ranks have the same weights.

    Weights equal DDP's to the rounding of sums over ranks and micro-batches. Such a sum is rounded
    some 2 * world * accumulate <= 16 times by at most 2^-24 of it, in one order or the other: 2e-6
    relatively. The update follows with a slope of at most lr / eps = 30, and gradients are below 1
    here: within 1e-4 at the very worst. What is found is near 1e-8; 2e-6 is less than a thousandth
    of one update (lr = 3e-3).
    """
    for runs in ranks:
        for options, (expected, run) in zip(settings, runs, strict=True):
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
    for other in ranks[1:]:
        for options, (_, run), (_, first) in zip(settings, other, ranks[0], strict=True):
            assert run.norms == first.norms, options
            for key, master in run.masters.items():
                assert torch.equal(master, first.masters[key]), (key, options)


@pytest.mark.parametrize(("world", "name", "dtype", "accumulate"), matrix())
def test_same_bits_as_with_ddp(
    world: int,
    name: str,
    dtype: str,
    accumulate: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    pool: RankPool = request.getfixturevalue(f"ranks{world}")
    settings = [{"placement_policy": "cpu", "zero_stage": stage} for stage in STAGES]
    if name not in NOT_IN_LEAST_MEMORY:
        settings.append(on_disk(tmp_path))
    for runs in pool.run(both, name, dtype, accumulate, settings):
        for options, (expected, run) in zip(settings, runs, strict=True):
            assert_same_bits(run, expected, options)


@pytest.mark.parametrize("name", ["routed", "batch-norm"])
def test_as_with_ddps_own_mean(name: str, ranks2: RankPool) -> None:
    settings = [{"placement_policy": "cpu", "zero_stage": stage} for stage in STAGES]
    assert_close(ranks2.run(both, name, "fp32", 2, settings, True), settings)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "checkpoint" else pytest.mark.extra)
        for name in sorted(OUT_OF_ORDER)
    ],
)
def test_least_memory_holds_the_buckets(name: str, ranks2: RankPool, tmp_path: Path) -> None:
    settings = [on_disk(tmp_path)]
    assert_close(ranks2.run(both, name, "fp32", 2, settings), settings)


def test_routed_in_least_memory(ranks4: RankPool, tmp_path: Path) -> None:
    """Experts that are used late, or by some ranks only."""
    settings = [on_disk(tmp_path)]
    assert_close(ranks4.run(both, "routed", "fp32", 1, settings), settings)


@pytest.mark.parametrize("stage", [2, 3])
def test_parts_that_only_one_rank_uses_in_all_micro_batches(ranks2: RankPool, stage: int) -> None:
    for norms, expected in ranks2.run(one_sided_parts, stage):
        assert norms == pytest.approx(expected, rel=1e-5)
