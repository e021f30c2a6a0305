"""colossalai.utils: what ColossalAI's examples use of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hetero.compat.ranks import rank, ranks


def get_current_device() -> torch.device:
    """torch's current CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_main_process() -> bool:
    """Whether this is the first rank."""
    return rank() == 0


def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    **options: Any,
) -> DataLoader[Any]:
    """A loader of this rank's part of a dataset.

    Args:
        dataset: of all ranks.
        shuffle: in another order in each epoch.
        seed: of the order, the same on all ranks.
        add_sampler: False: every rank gets all.
        drop_last: leaves out the last, smaller batch.
        options: further ones of torch.utils.data.DataLoader.

    Returns:
        The loader.
    """
    sampler: Any = None
    if add_sampler and ranks() > 1:
        sampler = DistributedSampler(
            dataset, num_replicas=ranks(), rank=rank(), shuffle=shuffle, seed=seed
        )
    return DataLoader(
        dataset,
        shuffle=shuffle and sampler is None,
        sampler=sampler,
        drop_last=drop_last,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
