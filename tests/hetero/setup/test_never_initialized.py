"""A model that was built in the context, and is used or saved without initialize().

tests/hetero/ranks/test_ending.py has programs that end with one.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hetero


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def pickled(model: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(model))
    return loaded


@pytest.mark.covering(1)
@pytest.mark.parametrize("again", [saved, pickled, copy.deepcopy])
@pytest.mark.parametrize("host_memory", ["1MiB", "40KiB"], ids=["in-ram", "offloaded"])
def test_a_copy_is_a_plain_model(
    again: Callable[[nn.Module], nn.Module], host_memory: str, tmp_path: Path
) -> None:
    options = {"placement_policy": "nvme", "nvme_path": tmp_path, "host_memory": host_memory}
    with hetero.ZeroInitContext(**options) as context:
        model = net()
    assert context.construction.any_offloaded == (host_memory == "40KiB")
    found = again(model)
    plain = net()
    for mine, its in zip(found.parameters(), plain.parameters(), strict=True):
        assert type(mine) is nn.Parameter
        assert torch.equal(mine, its)
    x = torch.ones(2, 64)
    found(x).sum().backward()
    plain(x).sum().backward()
    assert all(
        torch.equal(mine.grad, its.grad)
        for mine, its in zip(found.parameters(), plain.parameters(), strict=True)
    )
    # The copy is trained like any other model.
    optimizer = hetero.HybridAdam(found.parameters())
    hetero.initialize(found, optimizer, placement_policy="cpu")
    optimizer.engine.close()
