"""Construction inside ZeroInitContext gives the weights of plain construction, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hetero
from offload.memory.sizes import parse_bytes
from tests.support.training.loops import tiny_gpt2


class OwnInit(torch.nn.Module):
    """Initialisation as people write it by hand: .data, views, copies, whole-model loops."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 128)
        self.embedding = torch.nn.Embedding(200, 64, padding_idx=3)
        self.scale = torch.nn.Parameter(torch.ones(64, 64))
        self.bare = torch.nn.Parameter(torch.randn(128, 64))
        self.last = torch.nn.Linear(128, 64, bias=False)
        torch.nn.init.orthogonal_(self.last.weight)
        self.first.weight.data.normal_(0.0, 0.02)
        self.first.weight.data[3:7, ::2] = 0.5
        with torch.no_grad():
            self.scale[10:20].mul_(2.0)
            self.scale.add_(self.bare[:64] * 0.1)
            self.bare.copy_(self.first.weight.flip(0))
            self.embedding.weight[self.embedding.padding_idx].fill_(7.0)
            torch.nn.init.trunc_normal_(self.first.bias, std=self.bare.std().item())
            for name, parameter in self.named_parameters():
                if name.endswith("weight"):
                    parameter -= parameter.mean()
        self.norm = torch.nn.LayerNorm(64)
        self.twin = self.last


# (tests/zoo builds many more.)
MODELS = {"gpt2": tiny_gpt2, "own-init": OwnInit}


@pytest.mark.covering(1)
@pytest.mark.parametrize("host_memory", ["64MiB", "600KiB"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_weights_equal_plain_construction(
    make: Callable[[], torch.nn.Module], dtype: str, host_memory: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = make()
    after_plain = torch.rand(1)
    torch.manual_seed(0)
    with hetero.ZeroInitContext(
        placement_policy="nvme", dtype=dtype, nvme_path=str(tmp_path), host_memory=host_memory
    ) as context:
        model = make()
        after = torch.rand(1)
    assert torch.equal(after, after_plain), "the random numbers drawn are the same"
    was_absent = context.construction.any_offloaded
    total = sum(p.numel() * 4 for p in plain.parameters())
    assert was_absent == (total > parse_bytes(host_memory))
    optimizer = hetero.HybridAdam(model.parameters())
    model, optimizer = hetero.initialize(model, optimizer)
    names = dict(model.named_parameters())
    assert names.keys() == dict(plain.named_parameters()).keys()
    masters = hetero.masters(names.values())
    for (name, expected), master in zip(plain.named_parameters(), masters, strict=True):
        assert torch.equal(master, expected), name
        with hetero.gathered(names[name]):
            rounded = expected.to(optimizer.engine.chunk_groups[0].dtypes.torch_compute)
            assert torch.equal(names[name], rounded), name
    peak = optimizer.engine.ledger.peak_bytes["host"]
    assert peak <= parse_bytes(host_memory)
    optimizer.engine.close()


def test_context_leaves_modules_and_parameters_as_they_were() -> None:
    def changed() -> tuple[object, object]:
        return torch.nn.Module.register_parameter, torch.nn.Parameter.__deepcopy__

    before, new = changed(), torch.nn.Parameter.__new__
    with pytest.raises(KeyError), hetero.ZeroInitContext(placement_policy="cpu"):
        assert all(now is not was for now, was in zip(changed(), before, strict=True))
        raise KeyError
    assert (*changed(), torch.nn.Parameter.__new__) == (*before, new)


def test_contexts_do_not_nest() -> None:
    with (
        pytest.raises(hetero.HeteroError, match="nest"),
        hetero.ZeroInitContext(placement_policy="cpu"),
        hetero.ZeroInitContext(placement_policy="cpu"),
    ):
        pass


def test_a_context_that_adopts_nothing_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    with (
        pytest.raises(hetero.HeteroError, match=r"adopted no parameter.*build the model there"),
        hetero.ZeroInitContext(placement_policy="cpu"),
    ):
        model.float()
    with hetero.ZeroInitContext(placement_policy="cpu"):
        torch.nn.Linear(4, 4)  # adopted, and gone


def test_memory_somebody_else_holds_is_not_moved(tmp_path: Path) -> None:
    """A view taken before eviction must go on reaching the parameter."""
    with hetero.ZeroInitContext(
        placement_policy="nvme", nvme_path=str(tmp_path), host_memory="36KiB", dtype="fp32"
    ) as context:
        first = torch.nn.Linear(64, 64, bias=False)
        view = first.weight.data[0]
        second = torch.nn.Linear(64, 64, bias=False)
        third = torch.nn.Linear(32, 64, bias=False)
        view.fill_(5.0)
        assert context.construction.any_offloaded
        assert torch.equal(first.weight[0], torch.full((64,), 5.0))
        del second, third


def test_what_is_evicted_again_takes_no_new_space(tmp_path: Path) -> None:
    with (
        torch.no_grad(),
        hetero.ZeroInitContext(
            placement_policy="nvme", nvme_path=str(tmp_path), host_memory="36KiB", dtype="fp32"
        ) as context,
    ):
        layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(3)]
        for layer in layers:
            layer.weight.zero_()
        for turn in range(6):
            for layer in layers:
                layer.weight.add_(turn)
        ledger = context.construction.ledger
        assert ledger.peak_bytes["disk"] <= 3 * 64 * 64 * 4
        for layer in layers:
            assert torch.equal(layer.weight + 0, torch.full((64, 64), 15.0))


def test_notes_of_the_file_of_construction_reach_the_engine_once(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    with hetero.ZeroInitContext(
        placement_policy="nvme", nvme_path=[str(path) for path in paths], host_memory="600KiB"
    ) as context:
        model = tiny_gpt2()
    assert context.construction.any_offloaded
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    notes = optimizer.engine.notes
    for line in ("striped over 2 directories", "share a filesystem"):
        assert sum(line in note for note in notes) == 1
    optimizer.engine.close()


def test_dropped_parameters_give_their_bytes_back() -> None:
    with hetero.ZeroInitContext(placement_policy="cpu") as context:
        linear = torch.nn.Linear(64, 64)
        held = context.construction.ledger.in_use_bytes["host"]
        linear.weight = torch.nn.Parameter(torch.zeros(8, 64))
        assert context.construction.ledger.in_use_bytes["host"] == held - 56 * 64 * 4
