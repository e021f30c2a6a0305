"""Several ranks export one folder that a plain process reads, and load one together."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoint import exporting_ranks
from tests.support.checkpoint.exports import assert_same
from tests.support.ranks.processes import RankPool
from tests.support.training.saved_models import FAMILIES

DISK = {"placement_policy": "nvme", "host_memory": "4MiB"}


@pytest.mark.parametrize(
    ("family", "world", "mesh", "options", "dtype"),
    [
        ("llama-untied", 2, None, {"dtype": "bf16", **DISK}, "fp32"),
        ("mixtral-fused", 3, None, {"dtype": "fp32"}, None),
        ("gpt2-tied", 2, None, {"dtype": "bf16", "zero_stage": 1}, None),
        ("gpt2-tied", 4, (2, 2), {"dtype": "bf16"}, "fp32"),
    ],
)
def test_a_plain_process_reads_what_ranks_export(
    tmp_path: Path,
    family: str,
    world: int,
    mesh: tuple[int, ...] | None,
    options: dict[str, Any],
    dtype: str | None,
    ranks_of: Callable[[int], RankPool],
) -> None:
    if "host_memory" in options:
        options = options | {"nvme_path": str(tmp_path)}
    out = tmp_path / "out"
    ranks = ranks_of(world).run(exporting_ranks.export, family, options, str(out), dtype, mesh)
    model = FAMILIES[family].load(out)
    own = torch.float32 if "fp32" in (dtype, options["dtype"]) else torch.bfloat16
    masters = ranks[0]["masters"]
    plain = {name: p.detach() for name, p in model.named_parameters()}
    assert_same(plain, {name: masters[name].to(own) for name in plain})
    assert set(plain) == set(masters)
    for rank in ranks:
        assert_same(rank["masters"], masters)
        assert_same(rank["loaded"], {name: masters[name].to(own).float() for name in masters})
        assert_same(rank["state"], ranks[0]["state"])
    # Each byte was written by one rank, and each rank has written its part; replicas share chunks.
    total = sum(p.numel() * p.itemsize for p in plain.values())
    written = [rank["written"] for rank in ranks]
    shards = world if mesh is None else mesh[1]
    assert sum(written) == total
    assert all(each > 0 for each in written)
    assert max(written) < 1.5 * total / shards


def test_what_fails_on_one_rank_is_an_error_on_all(ranks2: RankPool, tmp_path: Path) -> None:
    first, second = ranks2.run(exporting_ranks.fail_on_one, str(tmp_path))
    steps = [
        ("StoreError: rank 1 could not write .*No space left", "StoreError: .*No space left"),
        (r"\[\]", r"\[\]"),
        (
            "CheckpointError: rank 1 could not write .*rank 1 does not see",
            "CheckpointError: rank 1 does not see",
        ),
        ("HeteroError: the exports differ between ranks", "the exports differ between ranks"),
        (r"\[\]", r"\[\]"),
        ("StoreError: rank 1 could not load .*No such file", "StoreError: .*No such file"),
        ("the folders of a .* differ between ranks", "the folders of a .* differ between ranks"),
        ("StoreError: rank 1 could not load .*No space left", "StoreError: .*No space left"),
        ("HeteroError: the model is half loaded", "HeteroError: the model is half loaded"),
        ("goes on: True", "goes on: True"),
    ]
    assert len(first) == len(second) == len(steps)
    for step, found in zip(steps, zip(first, second, strict=True), strict=True):
        for pattern, text in zip(step, found, strict=True):
            assert re.search(pattern, text, re.DOTALL), (pattern, text)
