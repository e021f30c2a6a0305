"""Parameters that are larger than the host budget are built tile by tile, in the scratch file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hetero
from hetero.setup.construction_store import BLOCK_BYTES
from hetero.setup.init_context import ZeroInitContext
from hetero.stand_ins.construction_uses import rows_of
from offload.memory.process_memory import resident_bytes
from offload.memory.sizes import parse_bytes
from tests.support.ranks import loading
from tests.support.ranks.processes import RankPool

BUDGET = BLOCK_BYTES + (1 << 20)
ROWS, WIDTH = 30013, 53  # 6 MiB of fp32, and no multiple of anything


def small_context(path: Path) -> ZeroInitContext:
    return hetero.ZeroInitContext(
        placement_policy="nvme", nvme_path=str(path), host_memory=BUDGET, dtype="fp32"
    )


def plain_embedding() -> nn.Module:
    return nn.Embedding(ROWS, WIDTH)


def gpt2_embedding() -> nn.Module:
    embedding = nn.Embedding(ROWS, WIDTH)
    nn.init.normal_(embedding.weight, mean=0.0, std=0.02)
    return embedding


def linear_and_more() -> nn.Module:
    layer = nn.Linear(WIDTH, ROWS)
    nn.init.xavier_normal_(layer.weight)
    with torch.no_grad():
        layer.weight.mul_(0.5).add_(1.0)
    return layer


def half_linear() -> nn.Module:
    return nn.Linear(2 * WIDTH, ROWS, dtype=torch.bfloat16)


def from_values() -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(ROWS, WIDTH))
    return module


@pytest.mark.parametrize(
    "make", [plain_embedding, gpt2_embedding, linear_and_more, half_linear, from_values]
)
def test_bits_and_random_numbers(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = make()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    with small_context(tmp_path) as context:
        made = make()
    assert torch.equal(torch.get_rng_state(), after)
    assert context.construction.is_offloaded(made.weight)
    assert context.construction.ledger.peak_bytes["host"] <= BUDGET
    assert torch.equal(rows_of(made.weight, slice(0, ROWS)), plain.weight)
    assert torch.equal(rows_of(made.weight, slice(1001, 1007)), plain.weight[1001:1007])
    context.construction.close()


def test_a_model_of_transformers(tmp_path: Path) -> None:
    """It puts functions of its own in the place of torch.nn.init's while it builds a model."""
    options: dict[str, Any] = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 25013}

    def make() -> Any:
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**options, bos_token_id=0, eos_token_id=0))

    plain = make()
    with small_context(tmp_path) as context:
        made = make()
    assert context.construction.is_offloaded(made.lm_head.weight)
    for param, expected in zip(made.parameters(), plain.parameters(), strict=True):
        elements = context.construction.elements(param, slice(0, param.numel()))
        assert torch.equal(elements.view(param.shape), expected)
    context.construction.close()


def test_a_parameter_without_elements_stays(tmp_path: Path) -> None:
    with small_context(tmp_path) as context:
        empty = nn.Module()
        empty.weight = nn.Parameter(torch.empty(0, 3))
    assert not context.construction.is_offloaded(empty.weight)
    context.construction.close()


def test_memory_is_a_tile(tmp_path: Path) -> None:
    """In RAM there is a tile at a time, of memory that would be 96 MiB."""
    nbytes = 96 << 20
    with small_context(tmp_path) as context:
        before = resident_bytes()
        peaks: list[int] = []
        change = context.construction.change

        def changed(param: Any, made: Any) -> bool:
            done = change(param, made)
            peaks.append(resident_bytes())
            return done

        context.construction.change = changed  # type: ignore[method-assign]
        embedding = nn.Embedding(nbytes // 4 // 256, 256)
        peaks.append(resident_bytes())
    assert len(peaks) == 2  # what draws the values, and afterwards
    assert max(peaks) - before < 4 * BLOCK_BYTES
    assert context.construction.is_offloaded(embedding.weight)
    context.construction.close()


def test_what_needs_all_values_is_refused_with_the_budget_that_works(tmp_path: Path) -> None:
    """What does not counts as a change of the parameter."""
    needed = ROWS * WIDTH * 4
    with small_context(tmp_path):
        embedding = plain_embedding()
        before = embedding.weight._version
        nn.init.zeros_(embedding.weight)
        assert embedding.weight._version > before
        with pytest.raises(hetero.BudgetError, match=f"{needed} bytes"):
            nn.init.orthogonal_(embedding.weight)


def test_a_budget_below_one_tile_is_refused(tmp_path: Path) -> None:
    context = hetero.ZeroInitContext(
        placement_policy="nvme", nvme_path=str(tmp_path), host_memory=BLOCK_BYTES - 4096
    )
    with pytest.raises(hetero.BudgetError, match="host_memory must be at least"), context:
        plain_embedding()


@pytest.mark.parametrize(
    ("placement", "host_memory"),
    # Either a parameter of 6 MiB alone is too large, or the second one beside a part of the first:
    # with a file that part would make room.
    [("nvme", "5MiB"), pytest.param("cpu", "7MiB", marks=pytest.mark.extra)],
)
def test_ranks_keep_parts(
    ranks2: RankPool, tmp_path: Path, placement: str, host_memory: str
) -> None:
    """Their parts are in the file, or in RAM; all draw the first rank's numbers."""
    options = {"placement_policy": placement, "host_memory": host_memory, "dtype": "fp32"}
    if placement == "nvme":
        options["nvme_path"] = str(tmp_path)
    first, second = ranks2.run(loading.build, options)
    for rank, found in ((1, second), (0, first)):
        torch.manual_seed(100 + rank)
        plain = loading.layers()
        assert torch.equal(found["next"], torch.rand(1)), "outside the block it is the rank's own"
    expected = [module.weight for module in plain]
    for found in (first, second):
        assert found["offloaded"] == [True, True]
        assert [nbytes > 0 for nbytes in found["kept"]] == [placement == "cpu", placement == "nvme"]
        assert all(map(torch.equal, found["weights"], expected))
        assert torch.equal(found["some"], plain[0].weight[1001:1007])  # type: ignore[index]
        assert found["peak"] <= parse_bytes(host_memory)
