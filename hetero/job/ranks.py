"""The ranks that train together: who this process is, and what it asks the others.

hetero shards the model by itself; this is about the data, what is shown and what is reported. Rank
0 speaks for all: it alone prints and writes the run folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hetero.ranks.process_groups import init_default_group
from offload.errors import HeteroError

# For a rank that hangs; one that ends is noticed at once. Loading a large model takes a while.
TIMEOUT = timedelta(minutes=10)

Made = TypeVar("Made")


@dataclass(frozen=True)
class Ranks:
    """This process is `rank` (from 0) of `count`, of which `local` run on this machine.

    They are connected by torch.distributed's default group.

    All ranks must make the same calls in the same order, or HeteroError is raised after TIMEOUT.
    """

    rank: int = 0
    count: int = 1
    local: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def gather(self, value: Made) -> list[Made]:
        """Every rank's value, in their order."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        with self._talking():
            dist.all_gather_object(found, value)
        return found

    def numbers(self, value: float) -> list[float]:
        """Every rank's number, in their order; costs less than gather()."""
        if self.count == 1:
            return [value]
        mine = torch.tensor([value], dtype=torch.float64, device="cpu")
        found = [torch.empty_like(mine) for _ in range(self.count)]
        with self._talking():
            dist.all_gather(found, mine)
        return [each.item() for each in found]

    def mean(self, value: float) -> float:
        """The same bits on all ranks."""
        return sum(self.numbers(value)) / self.count

    def from_first(self, make: Callable[[], Made]) -> Made:
        """What `make` returns on rank 0, where alone it runs; its ValueError is raised on all."""
        if self.count == 1:
            return make()
        answer: list[Any] = [None, ""]  # result, refusal
        if self.leads:
            try:
                answer[0] = make()
            except ValueError as error:
                answer[1] = str(error)
        with self._talking():
            dist.broadcast_object_list(answer, src=0)
        if answer[1]:
            raise ValueError(answer[1])
        made: Made = answer[0]
        return made

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise HeteroError(
                f"rank {self.rank} of {self.count} lost another rank, which ended or hangs; look"
                f" at that one's own error (here: {str(error).splitlines()[0]})"
            ) from error


ALONE = Ranks()


@contextmanager
def joined_ranks(backend: str = "gloo") -> Iterator[Ranks]:
    """The ranks that torchrun started, joined over `backend`, left at the end; each gets a GPU.

    What is initialized already is used and stays. Without WORLD_SIZE in the environment this
    process is alone. Raises ValueError if ranks are missing, or the environment says too little.
    """
    joins = not _initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if joins:
        try:
            init_default_group(TIMEOUT, backend)
        except RuntimeError as error:
            raise ValueError(
                f"cannot join the {os.environ['WORLD_SIZE']} ranks of WORLD_SIZE at"
                f" {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}; all of them"
                f" must be started (torchrun does): {str(error).splitlines()[0]}"
            ) from error
    if joins and torch.cuda.is_available():
        place = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(place % torch.cuda.device_count())
    try:
        if _initialized():
            count = dist.get_world_size()
            local = int(os.environ.get("LOCAL_WORLD_SIZE", count))
            yield Ranks(dist.get_rank(), count, local)
        else:
            yield ALONE
    finally:
        if joins:
            dist.destroy_process_group()


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
