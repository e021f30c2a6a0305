"""hetero/compat/deepspeed on two ranks: DeepSpeed's tutorial beside plain PyTorch over all data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.compat import deepspeed_ranks
from tests.support.compat.deepspeed_ranks import MICRO, STEPS, seed_of
from tests.support.compat.megatron import PLAIN, loss_of, run_megatron
from tests.support.ranks.processes import RankPool


@pytest.fixture(scope="module")
def expected() -> tuple[list[torch.Tensor], float]:
    """Weights and the last norm of plain PyTorch over the micro-batches of both ranks."""
    torch.manual_seed(0)
    plain = run_megatron(PLAIN, 0)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    for step in range(STEPS):
        for rank in range(2):
            for micro in range(MICRO):
                (loss_of(plain, seed_of(rank, step, micro)) / (2 * MICRO)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
    return [param.detach() for param in plain.parameters()], norm.item()


@pytest.mark.parametrize("stage", [1, 3])
def test_the_tutorial_on_two_ranks(
    stage: int, ranks2: RankPool, expected: tuple[list[torch.Tensor], float], tmp_path: Path
) -> None:
    weights, norm = expected
    path = str(tmp_path) if stage == 3 else ""
    for found in ranks2.run(deepspeed_ranks.train, stage, path):
        for master, weight in zip(found["masters"], weights, strict=True):
            torch.testing.assert_close(master, weight, rtol=1e-5, atol=1e-5)
        assert found["norm"] == pytest.approx(norm, rel=1e-5)
        assert found["batch"] == found["samples"] == 2 * MICRO * 2
        assert found["sent"] > 0


def test_a_configuration_with_nvme_that_comes_late(
    ranks2: RankPool, expected: tuple[list[torch.Tensor], float], tmp_path: Path
) -> None:
    for found in ranks2.run(deepspeed_ranks.train_on_nvme, str(tmp_path)):
        for master, weight in zip(found["masters"], expected[0], strict=True):
            torch.testing.assert_close(master, weight, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("quick_python")
def test_one_rank_of_torchrun_has_a_group() -> None:
    """DeepSpeed makes one, and loops ask torch.distributed for their rank."""
    program = """
import torch, torch.distributed as dist
from hetero.compat import deepspeed
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
engine, *_ = deepspeed.initialize(model=model, config=config)
assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
for _ in range(2):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
engine.optimizer.engine.close()
dist.destroy_process_group()
"""
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **launched},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_ranks_that_come_late_are_refused(ranks2: RankPool) -> None:
    for said in ranks2.run(deepspeed_ranks.replicas_that_come_late):
        assert said.startswith("the model was built with another mesh")


def test_an_overflow_of_one_rank_skips_the_step_of_all(ranks2: RankPool) -> None:
    for found in ranks2.run(deepspeed_ranks.overflow_on_the_second):
        assert found == [(False, 1, 128.0), (True, 1, 128.0)]


def test_shards_within_some_ranks_only(
    ranks2: RankPool, expected: tuple[list[torch.Tensor], float]
) -> None:
    """MiCS: each rank keeps all, and both are replicas."""
    for found in ranks2.run(deepspeed_ranks.train_replicas):
        assert found["replicas"] == 2
        for master, weight in zip(found["masters"], expected[0], strict=True):
            torch.testing.assert_close(master, weight, rtol=1e-5, atol=1e-5)


def test_writes_without_a_modifier_are_the_same_or_refused(ranks2: RankPool) -> None:
    same, others, one = ranks2.run(deepspeed_ranks.write_without_a_modifier)[0]
    assert same == ("", [2.0])
    for said, _ in (others, one):
        assert "the checksum of 1.weight is" in said
        assert "name the rank whose values count as modifier_rank" in said
