"""hetero/setup/init_context: models that are built on the meta device and get their values later,
as Hugging Face's from_pretrained() makes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from torch import nn

import hetero
from hetero.setup.construction import ConstructionArena
from offload.memory.sizes import parse_bytes
from tests.support.ranks.processes import run_forked
from tests.support.training.saved_models import FAMILIES, SHAPE, Family, batches, loss_of

MATRIX_BYTES = 64 * 64 * 4


def context(path: Path, **options: Any) -> hetero.ZeroInitContext:
    return hetero.ZeroInitContext(
        **{"placement_policy": "nvme", "dtype": "fp32", "nvme_path": str(path), **options}
    )


def train(model: nn.Module, optimizer: Any) -> list[float]:
    """Losses of some steps; without dropout, because a loaded model is in evaluation mode."""
    losses = []
    for tokens in batches():
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class TestFromPretrained:
    @pytest.mark.covering(1)
    @pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
    @pytest.mark.parametrize("is_tight", [False, True])
    def test_everything_is_as_outside(self, family: Family, is_tight: bool, tmp_path: Path) -> None:
        family.save(tmp_path / "model")
        plain = family.load(tmp_path / "model")
        drawn = torch.rand(1)
        budget = family.host_memory if is_tight else "64MiB"
        with context(tmp_path, host_memory=budget) as made:
            model = family.load(tmp_path / "model")
            assert torch.equal(torch.rand(1), drawn)
        assert made.construction.any_offloaded == is_tight
        assert made.construction.ledger.peak_bytes["host"] <= parse_bytes(budget)
        named = dict(plain.named_parameters(remove_duplicate=False))
        mine = dict(model.named_parameters(remove_duplicate=False))
        assert named.keys() == mine.keys()
        for name, param in named.items():
            assert torch.equal(mine[name], param), name
            assert mine[name].requires_grad == param.requires_grad
        ties = {n: m for n, p in named.items() for m, q in named.items() if p is q and m != n}
        assert all(mine[n] is mine[m] for n, m in ties.items())
        buffers = dict(model.named_buffers())
        for name, buffer in plain.named_buffers():
            assert torch.equal(buffers[name], buffer), name
        assert model.training == plain.training
        model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
        assert all(map(torch.equal, hetero.masters(model.parameters()), plain.parameters()))
        optimizer.engine.close()

    @pytest.mark.parametrize("name", ["gpt2-tied", "bert-new-head", "mixtral-fused"])
    def test_training_and_saving_are_as_outside(self, name: str, tmp_path: Path) -> None:
        family = FAMILIES[name]
        family.save(tmp_path / "model")
        outside = family.load(tmp_path / "model")
        outside, plain = hetero.initialize(
            outside,
            hetero.HybridAdam(outside.parameters(), lr=1e-2),
            placement_policy="nvme",
            nvme_path=str(tmp_path),
            dtype="bf16",
        )
        expected = train(outside, plain)
        with context(tmp_path, dtype="bf16", host_memory=family.host_memory):
            model = family.load(tmp_path / "model")
        model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), lr=1e-2))
        assert train(model, optimizer) == expected
        masters = hetero.masters(model.parameters())
        assert all(map(torch.equal, masters, hetero.masters(outside.parameters())))
        model.save_pretrained(tmp_path / "tuned", max_shard_size="100KB")
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        plain.engine.close()
        optimizer.engine.close()
        again = dict(family.load(tmp_path / "tuned").named_parameters())
        assert again.keys() == values.keys()
        for name, value in values.items():
            assert again[name].dtype == torch.bfloat16
            assert torch.equal(again[name], value), name

    def test_the_environment_is_as_before(self, tmp_path: Path) -> None:
        before = dict(os.environ)
        with context(tmp_path):
            nn.Linear(2, 2)
            assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "1"
        assert dict(os.environ) == before


def anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        (found,) = (line for line in file if line.startswith("RssAnon:"))
    return int(found.split()[1]) << 10


def load(folder: str, nvme_path: str, budget: int) -> tuple[int, int]:
    """Bytes by which this process grew at most, and of those that were charged."""
    adopt, sampled = ConstructionArena.adopt, [anonymous_bytes()]

    def sample(*arguments: Any) -> None:
        sampled.append(anonymous_bytes())
        adopt(*arguments)
        sampled.append(anonymous_bytes())

    torch.set_num_threads(1)
    with (
        patch.object(ConstructionArena, "adopt", sample),
        hetero.ZeroInitContext(
            placement_policy="nvme", nvme_path=nvme_path, host_memory=budget
        ) as made,
    ):
        hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return max(sampled) - sampled[0], made.construction.ledger.peak_bytes["host"]


def test_a_folder_larger_than_the_budget_streams(tmp_path: Path) -> None:
    """Anonymous memory is counted: pages of the folder's files are the kernel's to give up.

    The folder is of bf16, so that each tensor takes memory when it becomes fp32.
    """
    budget, largest, constant = 19 << 20, 512 * 1024 * 4, 16 << 20
    config = hf.LlamaConfig(
        **{**SHAPE, "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1024}
    )
    model = hf.LlamaForCausalLM(config).bfloat16()
    assert sum(p.numel() for p in model.parameters()) * 4 > 4 * budget
    model.save_pretrained(tmp_path / "model", max_shard_size="10MB")
    del model
    grown, charged = run_forked(load, str(tmp_path / "model"), str(tmp_path), budget)
    assert charged <= budget
    assert grown <= budget + largest + constant, f"{grown / 2**20:.1f} MiB"


def layers(number: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(number)))


def on_meta(number: int = 6) -> nn.Sequential:
    with torch.device("meta"):
        return layers(number)


Fill = Callable[[nn.Module, nn.Module], object]


def initialised(model: nn.Module, plain: nn.Module) -> None:
    """After to_empty()."""
    for each in (plain, model.to_empty(device="cpu")):
        torch.manual_seed(0)
        for param in each.parameters():
            nn.init.normal_(param)


def assigned(model: nn.Module, plain: nn.Module) -> None:
    """Piece by piece, as a checkpoint of several files."""
    for name, values in plain.state_dict().items():
        model.load_state_dict({name: values.clone()}, strict=False, assign=True)


def unregistered(model: nn.Sequential, plain: nn.Sequential) -> None:
    """accelerate does that for versions of transformers before 5."""
    for mine, theirs in zip(model, plain, strict=True):
        mine._parameters["weight"] = nn.Parameter(theirs.weight.detach().clone())


class TestPlainTorch:
    @pytest.mark.parametrize("fill", [initialised, assigned, unregistered])
    def test_values_come_later(self, fill: Fill, tmp_path: Path) -> None:
        plain = layers()
        with context(tmp_path, host_memory=int(2.5 * MATRIX_BYTES)) as made:
            model = on_meta()
            fill(model, plain)
        assert made.construction.any_offloaded
        assert made.construction.ledger.peak_bytes["host"] <= 2.5 * MATRIX_BYTES
        assert all(map(torch.equal, model.parameters(), plain.parameters()))

    def test_a_state_dict_that_stays_must_fit(self, tmp_path: Path) -> None:
        state = layers().state_dict()
        with (  # torch collects what fails in an error of its own
            pytest.raises(RuntimeError, match=r"other tensors have the same memory.*49152 bytes"),
            context(tmp_path, host_memory=int(2.5 * MATRIX_BYTES)),
        ):
            on_meta().load_state_dict(state, assign=True)
        with context(tmp_path, host_memory="1MiB"):
            model = on_meta()
            model.load_state_dict(state, assign=True)
        assert all(map(torch.equal, model.parameters(), state.values()))

    def test_parameters_left_on_meta(self, tmp_path: Path) -> None:
        with context(tmp_path):
            model = on_meta(3)
            model[0].to_empty(device="cpu")
        with pytest.raises(
            hetero.HeteroError,
            match=r"'1\.weight' of shape \(64, 64\) is on the meta device.*like 1 others.*assign",
        ):
            hetero.initialize(model, hetero.HybridAdam(model.parameters()))
        model[0].register_buffer("scale", torch.empty(3, device="meta"))
        with pytest.raises(hetero.HeteroError, match=r"buffer 'scale' of shape \(3,\).*meta"):
            hetero.initialize(model[0], hetero.HybridAdam(model[0].parameters()))

    def test_a_context_that_leaves_all_on_meta(self, tmp_path: Path) -> None:
        with (
            pytest.raises(hetero.HeteroError, match="all are on the meta device still"),
            context(tmp_path),
        ):
            on_meta()
