"""hetero/setup/init_context: loops that make the optimizer themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import hetero
from tests.support.late import late
from tests.support.training.small_net import Net, loss_of

hf = late("transformers")  # of which the Trainer imports more than all else


def context(policy: str, path: Path) -> hetero.ZeroInitContext:
    return hetero.ZeroInitContext(placement_policy=policy, dtype="fp32", nvme_path=str(path))


class Sentences(torch.utils.data.Dataset[Any]):
    """Random tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 64, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A small language model, as Hugging Face saves it."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def trainer(model: nn.Module, path: Path, optimizer: Any, steps: int) -> Any:
    arguments = hf.TrainingArguments(
        output_dir=str(path / "out"),
        max_steps=steps,
        save_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",  # a decay would depend on max_steps
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    options = {"lr": 1e-2, "betas": (0.9, 0.95)}
    return hf.Trainer(
        model,
        arguments,
        train_dataset=Sentences(),
        optimizer_cls_and_kwargs=(optimizer, options),
    )


def test_a_trainer_makes_the_optimizer(folder: str, tmp_path: Path) -> None:
    """Also one that goes on from a checkpoint, whose state is loaded before the first forward."""
    plain = AutoModelForCausalLM.from_pretrained(folder)
    wanted = trainer(plain, tmp_path / "plain", torch.optim.AdamW, 5)
    wanted.train()
    for resumed in (False, True):
        with context("nvme", tmp_path):
            model = AutoModelForCausalLM.from_pretrained(folder)
        found = trainer(model, tmp_path / "managed", hetero.HybridAdam, 5 if resumed else 3)
        found.train(resume_from_checkpoint=resumed)
        losses = [
            [entry["loss"] for entry in each.state.log_history if "loss" in entry]
            for each in (found, wanted)
        ]
        assert losses[0] == pytest.approx(losses[1][: len(losses[0])], rel=1e-5)
        optimizer = found.optimizer.optimizer
        masters = hetero.masters(model.parameters())
        for master, (name, param) in zip(masters, plain.named_parameters(), strict=True):
            # (Gradients of the keys' biases are rounding noise, of which Adam makes steps.)
            if resumed and "c_attn.bias" not in name:
                torch.testing.assert_close(master, param.detach(), rtol=1e-4, atol=1e-5)
        optimizer.engine.close()


@pytest.mark.parametrize("policy", ["cpu", "nvme"])
def test_a_loop_without_initialize(policy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with context(policy, tmp_path):
        model = Net()
    with torch.no_grad():
        loss_of(model)  # nothing is trained by this
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
    assert optimizer.state_dict()["state"] == {}
    optimizer.load_state_dict(optimizer.state_dict())
    model.first(torch.zeros(1, 64))  # a part of the model
    torch.manual_seed(0)
    plain = Net()
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for seed in range(3):
        for each, its in ((model, optimizer), (plain, adam)):
            loss_of(each, seed).backward()
            its.step()
            its.zero_grad()
    for master, param in zip(hetero.masters(model.parameters()), plain.parameters(), strict=True):
        torch.testing.assert_close(master, param.detach(), rtol=1e-5, atol=1e-5)
    assert hetero.initialize(model, optimizer) == (model, optimizer)
    with pytest.raises(ValueError, match="initialized already"):
        hetero.initialize(model, optimizer, dtype="bf16")
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
    optimizer.engine.close()


def test_which_of_two_optimizers_is_not_guessed(tmp_path: Path) -> None:
    with context("cpu", tmp_path):
        model = Net()
    first = hetero.HybridAdam(model.first.parameters())
    last = hetero.HybridAdam(model.last.parameters())
    loss_of(model).backward()
    for optimizer in (first, last):
        with pytest.raises(hetero.UnmanagedParameterError, match=r"call.*hetero.initialize"):
            optimizer.step()
    del model, first, last, optimizer


def test_options_that_are_loaded_before_initialize(tmp_path: Path) -> None:
    """They count at once, and what a scheduler makes of them afterwards stays."""
    states = []
    for early in (False, True):
        torch.manual_seed(0)
        with context("cpu", tmp_path):
            model = Net()
        optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
        if early:
            only_options = {"state": {}, "param_groups": states[0]["param_groups"]}
            for state in (only_options, states[0]):
                optimizer.param_groups[0]["lr"] = 1e-2
                optimizer.load_state_dict(state)
                assert optimizer.param_groups[0]["lr"] == 0.5
            assert optimizer.state_dict()["state"].keys() == states[0]["state"].keys()
            optimizer.param_groups[0]["lr"] = 0.25
            with pytest.raises(ValueError, match="0 param groups, and this optimizer has 1"):
                optimizer.load_state_dict({**states[0], "param_groups": []})
        loss_of(model).backward()
        if early:
            assert optimizer.param_groups[0]["lr"] == 0.25
            assert optimizer.engine.find(model.last.weight).step == 1
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
        states.append(optimizer.state_dict())
        optimizer.engine.close()
