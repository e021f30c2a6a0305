"""hetero/setup/init_context: several ranks load a folder together by from_pretrained()."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.memory.sizes import PAGE_BYTES, parse_bytes, round_up
from tests.support.ranks import loading
from tests.support.ranks.processes import RankPool
from tests.support.training.plain_adam import Master
from tests.support.training.saved_models import FAMILIES, batches, loss_of

LAYERS = 12
ADAM: dict[str, Any] = {
    "lr": loading.LR,
    "weight_decay": 0.0,
    "decoupled": True,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
}


def masters_after_a_step(model: nn.Module, trained: str) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of all ranks' batches, and plain PyTorch's weights after a step with the mean of
    their gradients."""
    params = list(model.parameters())
    masters = {param: Master(param) for param in params if loading.is_trained(param, trained)}
    losses, grads = [], []
    for tokens in batches():
        loss = loss_of(model, tokens)
        losses.append(loss.item())
        grads.append(torch.autograd.grad(loss, list(masters), allow_unused=True))
    for master, *found in zip(masters.values(), *grads, strict=True):
        if any(grad is not None for grad in found):
            master.update(sum(grad for grad in found if grad is not None) / len(found), **ADAM)
    return losses, [masters[p].weight if p in masters else p.detach() for p in params]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As on the ranks: by their number the order changes in which torch adds up gradients."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("family", "policy", "host_memory", "trained"),
    [
        pytest.param("gpt2-tied", "cpu", "1720KiB", "vectors", marks=pytest.mark.extra),
        ("gpt2-tied", "nvme", "600KiB", "all"),
        ("llama-untied", "cpu", "1400KiB", "vectors"),
        pytest.param("llama-untied", "nvme", "600KiB", "all", marks=pytest.mark.extra),
        pytest.param("bert-new-head", "nvme", "600KiB", "all", marks=pytest.mark.extra),
    ],
)
def test_ranks_load_what_plain_pytorch_loads(
    ranks2: RankPool, tmp_path: Path, family: str, policy: str, host_memory: str, trained: str
) -> None:
    """The whole model does not fit one rank's budget; with policy "cpu" there is no other memory
    than the ranks'."""
    FAMILIES[family].save(tmp_path / "model", LAYERS)
    options = {"placement_policy": policy, "host_memory": host_memory, "chunk_numel": 8192}
    if policy == "nvme":
        options["nvme_path"] = str(tmp_path)
    found = ranks2.run(loading.load_and_step, family, str(tmp_path / "model"), options, trained)

    plain = FAMILIES[family].load(tmp_path / "model")
    params = list(plain.parameters())
    budget = parse_bytes(host_memory)
    assert budget < sum(param.nbytes for param in params)
    losses, masters = masters_after_a_step(plain, trained)
    assert [one["loss"] for one in found] == losses
    for one in found:
        assert all(map(torch.equal, one["masters"], params))
        assert all(map(torch.equal, one["masters after a step"], masters))
        for name, buffer in plain.named_buffers():
            assert torch.equal(one["buffers"][name], buffer), name
        assert one["peak in the block"] <= one["peak"] <= budget
    assert found[0]["drawn"] != found[1]["drawn"]  # outside the block they are each rank's own
    assert found[0]["offloaded"] == found[1]["offloaded"]
    for one in found:
        kept = [
            ceil(param.nbytes / 2) if is_offloaded else param.nbytes
            for param, is_offloaded in zip(params, one["offloaded"], strict=True)
        ]
        in_ram, on_disk = one["kept"]
        assert in_ram <= sum(kept)
        assert (in_ram == sum(kept)) == (on_disk == 0)
        assert in_ram + on_disk <= sum(round_up(nbytes, PAGE_BYTES) for nbytes in kept)
