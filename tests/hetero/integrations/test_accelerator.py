"""hetero/integrations/accelerator: a plain loop of Accelerate's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from tests.support.ecosystem.tiny_models import Sentences, gpt2_folder
from tests.support.late import late
from tests.support.ranks import rank_training
from tests.support.ranks.processes import RankPool

accelerate, AutoModelForCausalLM = late("accelerate"), late("transformers:AutoModelForCausalLM")
Accelerator = late("hetero.integrations.accelerator:Accelerator")
check_plain = late("hetero.integrations.accelerator:check_plain")


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    """The library keeps its settings in class attributes."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def loader_of(sentences: Any) -> Any:
    """With a generator of its own: beginning to iterate draws a number, also in a resumed run."""
    return torch.utils.data.DataLoader(sentences, batch_size=2, generator=torch.Generator())


def prepared(accelerator: Any, model: Any, kind: Any) -> tuple[Any, ...]:
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = loader_of(Sentences())
    return tuple(accelerator.prepare(model, optimizer, loader, scheduler))


def run(accelerator: Any, parts: tuple[Any, ...], skipped: int = 0, saved: Any = None) -> Any:
    """One epoch; `saved` is saved to after 4 of 8 batches."""
    model, optimizer, loader, scheduler = parts
    model.train()
    losses = []
    if skipped:
        loader = accelerator.skip_first_batches(loader, skipped)
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if saved is not None and index == 3:
            accelerator.save_state(str(saved))
    return losses


def managed(folder: Path, policy: str, path: Path) -> Any:
    with hetero.ZeroInitContext(placement_policy=policy, dtype="fp32", nvme_path=str(path)):
        return AutoModelForCausalLM.from_pretrained(folder)


def test_a_loop_and_its_state(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(7)
    wanted_by = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    wanted = run(wanted_by, prepared(wanted_by, plain, torch.optim.AdamW))
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = managed(folder, "nvme", tmp_path)
    torch.manual_seed(7)
    parts = prepared(accelerator, model, hetero.HybridAdam)
    assert parts[0] is model
    losses = run(accelerator, parts, saved=tmp_path / "state")
    assert losses == pytest.approx(wanted, rel=1e-5)
    masters = hetero.masters(model.parameters())
    parts[1].optimizer.engine.close()
    assert not list((tmp_path / "state").glob("model*"))
    assert not list((tmp_path / "state").glob("optimizer*"))
    again = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(99)
    optimizer = hetero.HybridAdam(model.parameters(), lr=1.0)
    hetero.initialize(model, optimizer, placement_policy="cpu", dtype="fp32")
    loader = loader_of(Sentences())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    parts = again.prepare(model, optimizer, loader, scheduler)
    again.load_state(str(tmp_path / "state"))
    assert run(again, parts, skipped=4) == losses[4:]
    assert all(map(torch.equal, hetero.masters(model.parameters()), masters))
    optimizer.engine.close()


def test_the_last_folder_that_the_library_has_named(tmp_path: Path) -> None:
    naming = accelerate.utils.ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True
    )
    accelerator = Accelerator(cpu=True, project_config=naming)
    with pytest.raises(ValueError, match="load_state.. needs the folder"):
        accelerator.load_state()
    model = torch.nn.Linear(2, 2)
    optimizer = hetero.HybridSGD(model.parameters(), lr=1.0)
    hetero.initialize(model, optimizer, dtype="fp32", placement_policy="cpu")
    accelerator.prepare(model, optimizer)
    weights = []
    for _ in range(11):  # 10 comes after 9, not after 1
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        weights.append(model.weight.detach().clone())
        accelerator.save_state()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    accelerator.load_state()
    assert torch.equal(model.weight, weights[-1])
    optimizer.engine.close()


def test_hooks_of_the_state_get_the_model(tmp_path: Path) -> None:
    """As scripts of diffusers have them: adapters beside the state, read again with it."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = hetero.HybridSGD(model.parameters(), lr=1.0)
    hetero.initialize(model, optimizer, dtype="bf16", placement_policy="cpu")
    accelerator.prepare(model, optimizer)

    def before_save(models: list[Any], weights: list[Any], folder: str) -> None:
        for each in models:
            assert torch.equal(weights.pop()["bias"], each.bias)
            torch.save(each.state_dict(), f"{folder}/own.pt")

    def before_load(models: list[Any], folder: str) -> None:
        while models:
            models.pop().load_state_dict(torch.load(f"{folder}/own.pt"))

    accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(before_load)
    masters = hetero.masters(model.parameters())
    accelerator.save_state(str(tmp_path))
    assert torch.load(tmp_path / "own.pt").keys() == {"weight", "bias"}
    model.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
    accelerator.load_state(str(tmp_path))
    assert all(map(torch.equal, hetero.masters(model.parameters()), masters))
    optimizer.engine.close()


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = gpt2_folder(tmp_path / "model")
    accelerator = Accelerator(cpu=True)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
    with pytest.raises(ValueError, match="the optimizer is AdamW, and a model that hetero"):
        accelerator.save_state(str(tmp_path / "state"))
    with pytest.raises(ValueError, match="load_state.. needs the folder"):
        accelerator.load_state()
    accelerator.prepare(AutoModelForCausalLM.from_pretrained(folder))
    with pytest.raises(hetero.HeteroError, match="2 models were prepared"):
        accelerator.save_state(str(tmp_path / "state"))
    sharding = property(lambda _: accelerate.DistributedType.FSDP)
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", sharding)
    with pytest.raises(ValueError, match="the Accelerator is set up for FSDP"):
        check_plain(accelerator)


def clipped(rank: int, world: int) -> float:
    """The norm by which a step was clipped in which each rank has used an expert of its own."""
    model, optimizer = rank_training.make("experts", {})
    model(rank_training.inputs(rank, 0), rank).square().mean().backward()
    norm = Accelerator(cpu=True).clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.engine.close()
    return float(norm)


def test_ranks_that_use_different_parameters_clip_alike(ranks2: RankPool) -> None:
    torch.manual_seed(0)
    model = rank_training.Experts(4)
    for rank in range(2):
        (model(rank_training.inputs(rank, 0), rank).square().mean() / 2).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert ranks2.run(clipped) == pytest.approx([expected] * 2)
