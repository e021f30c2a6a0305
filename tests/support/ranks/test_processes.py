"""The ranks that other tests run on: order, failures, and that one failure is one call's."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks.processes import RankFailure, RankPool


def summed(rank: int, world: int, factor: float) -> tuple[int, str, torch.Tensor]:
    value = torch.full((3,), factor * (rank + 1))
    dist.all_reduce(value)
    assert dist.get_world_size() == world
    assert torch.get_num_threads() == 1
    return rank, os.environ["LOCAL_RANK"] + "/" + os.environ["WORLD_SIZE"], value


def process_id(rank: int, world: int) -> int:
    return os.getpid()


def fails_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("the lost key")
    dist.barrier()


def dies_on_one(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hangs_on_one(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(1000)


def check_sum(pool: RankPool) -> None:
    for rank, (number, variables, value) in enumerate(pool.run(summed, 2.0)):
        assert (number, variables) == (rank, f"{rank}/2")
        assert torch.equal(value, torch.full((3,), 6.0))


@pytest.mark.slow
@pytest.mark.extra
def test_a_failure_names_its_rank_and_is_not_the_next_calls() -> None:
    with RankPool(2) as pool:
        before = pool.run(process_id)
        with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2 failed.*the lost key") as failure:
            pool.run(fails_on_one)
        assert "in fails_on_one" in str(failure.value)
        assert not set(pool.run(process_id)) & set(before)
        with pytest.raises(RankFailure, match="rank 1 of 2 died with exit code -9"):
            pool.run(dies_on_one)
        check_sum(pool)
        with pytest.raises(RankFailure, match="still running after 5 s: (0, )?1") as failure:
            pool.run(hangs_on_one, timeout_s=5)
        assert "in hangs_on_one" in str(failure.value)
        check_sum(pool)
        alive = pool.run(process_id)
    for pid in (*before, *alive):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_cannot_be_sent_is_told_at_once() -> None:
    with RankPool(2) as pool, pytest.raises(AttributeError, match="pickle"):
        pool.run(lambda rank, world: None)
