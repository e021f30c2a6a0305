"""Modules: conversions, hooks, tied weights, torch.nn.utils, PEFT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.support.compatibility.touch import Case, Net, Section, ballast, changed
from tests.support.late import late
from tests.support.training.loops import tiny_gpt2

MODULES = Section("Modules")
peft = late("peft")


def convert(name: str, how: Callable[[nn.Module], object]) -> None:
    """Something that gives the model another dtype, device or memory, or the same."""

    def use(case: Case) -> torch.Tensor:
        how(case.model)
        return case.model.last.weight.detach().clone()

    MODULES.add(name, use, goes_on=False)


convert("`model.to('cpu')`, `model.cpu()`", lambda m: m.to("cpu").cpu())
convert("`model.half()`", lambda m: m.half())
convert("`model.double()`", lambda m: m.double())
convert("`model.to_empty(device='cpu')`", lambda m: m.to_empty(device="cpu"))
convert("`model.share_memory()`", lambda m: m.share_memory())


@MODULES.touch("`model.register_buffer`, `model.train()`, `model.eval()`")
def modes(case: Case) -> bool:
    case.model.register_buffer("steps", torch.zeros(1))
    return case.model.eval().train().training


@MODULES.touch("module forward and backward hooks")
def hooks(case: Case) -> list[object]:
    case.rank, seen = None, []
    handles = [
        case.model.last.register_forward_pre_hook(lambda m, x: seen.append(m.weight.sum().item())),
        case.model.last.register_forward_hook(lambda m, x, y: seen.append(m.bias.sum().item())),
        case.model.last.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].float())),
        case.model.register_full_backward_pre_hook(lambda m, go: seen.append(go[0].float())),
    ]
    case.backward()
    for handle in handles:
        handle.remove()
    case.optimizer.step()
    return seen


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def register(model: Net) -> None:
    parametrize.register_parametrization(model.last, "weight", Symmetric())


def tie(model: Net) -> None:
    model.last.weight = model.first.weight


def norm(model: Net) -> None:
    parametrizations.weight_norm(model.first)
    parametrizations.spectral_norm(model.last)


TIED, PARAMETRIZED, NORMED = changed(tie), changed(register), changed(norm)
OLD_NORMED = changed(lambda m: torch.nn.utils.weight_norm(m.first))
OLD_SPECTRAL = changed(lambda m: torch.nn.utils.spectral_norm(m.last))
PRUNED = changed(lambda m: prune.l1_unstructured(m.last, "weight", 0.5))


def output(case: Case) -> torch.Tensor:
    with torch.no_grad():
        return case.model(torch.ones(2, 64, dtype=case.dtype))


def trained(case: Case) -> torch.Tensor:
    case.train()
    return output(case)


MODULES.add("tied weights: `a.weight = b.weight`", trained, build=TIED)
MODULES.add("`parametrize` before `initialize`", trained, build=PARAMETRIZED)
MODULES.add("`parametrizations.weight_norm`, `spectral_norm` before", trained, build=NORMED)
MODULES.add("`weight_norm` (hooks) before", trained, build=OLD_NORMED)
MODULES.add("`spectral_norm` (hooks) before", trained, build=OLD_SPECTRAL, on_disk=False)
MODULES.add("`prune.l1_unstructured` before", trained, build=PRUNED)


@MODULES.touch("`parametrize.remove_parametrizations`", build=PARAMETRIZED)
def remove_parametrization(case: Case) -> torch.Tensor:
    parametrize.remove_parametrizations(case.model.last, "weight", leave_parametrized=True)
    return output(case)


@MODULES.touch("`remove_weight_norm`", build=OLD_NORMED)
def remove_weight_norm(case: Case) -> torch.Tensor:
    torch.nn.utils.remove_weight_norm(case.model.first)
    return output(case)


@MODULES.touch("`prune.remove`", build=PRUNED)
def remove_pruning(case: Case) -> torch.Tensor:
    prune.remove(case.model.last, "weight")
    return output(case)


def after(name: str, how: Callable[[Net], object]) -> None:
    """What changes a module that is managed already."""

    def use(case: Case) -> torch.Tensor:
        how(case.model)
        return trained(case)

    MODULES.add(name, use)


after("`a.weight = b.weight` after `initialize`", tie)
after("`register_parametrization` after", register)
after("`parametrizations.weight_norm` after", lambda m: parametrizations.weight_norm(m.last))
after("`parametrizations.spectral_norm` after", lambda m: parametrizations.spectral_norm(m.last))
after("`weight_norm` (hooks) after", lambda m: torch.nn.utils.weight_norm(m.last))
after("`spectral_norm` (hooks) after", lambda m: torch.nn.utils.spectral_norm(m.last))
after("`prune.l1_unstructured` after", lambda m: prune.l1_unstructured(m.last, "weight", 0.5))
after("`del model.unused`", lambda m: delattr(m, "unused"))


class Normalised(nn.Module):
    """A convolution and what may be fused with it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.ballast = ballast()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x.view(-1, 4, 16))).flatten(1)


@MODULES.touch("`fuse_conv_bn_eval`", build=Normalised, on_disk=False, goes_on=False)
def fuse(case: Case) -> torch.Tensor:
    case.model.eval()
    fused = torch.nn.utils.fusion.fuse_conv_bn_eval(case.model.conv, case.model.norm)
    return fused(torch.ones(2, 4, 16, dtype=case.dtype)).detach()


def untie(model: Net) -> None:
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())


MODULES.add(
    "untying after: `a.weight = nn.Parameter(b.weight.detach().clone())`",
    lambda c: (untie(c.model), trained(c))[1],
    build=TIED,
)


class Empty(Net):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum()


@MODULES.touch("a parameter without elements: `nn.Parameter(torch.empty(0))`", build=Empty)
def empty(case: Case) -> object:
    case.train()
    nothing = case.model.nothing
    return [nothing.shape, nothing.detach().clone(), output(case), list(case.model.state_dict())]


class Language(nn.Module):
    """A language model of transformers, whose head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
        self.lm = tiny_gpt2(32, 1, n_positions=16, vocab_size=101)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x[:, :16].abs() * 30).long().clamp(max=100)
        logits: torch.Tensor = self.lm(input_ids=tokens).logits
        return logits


class Resized(Language):
    """Its vocabulary has grown."""

    def __init__(self) -> None:
        super().__init__()
        self.lm.resize_token_embeddings(107, mean_resizing=False)


MODULES.add("transformers: tied embeddings train", trained, build=Language)
MODULES.add(
    "`add_tokens`, `resize_token_embeddings` inside `ZeroInitContext`", trained, build=Resized
)


@MODULES.touch("`add_tokens`, `resize_token_embeddings` after `initialize`", build=Language)
def resize(case: Case) -> torch.Tensor:
    case.model.lm.resize_token_embeddings(107, mean_resizing=False)
    return trained(case)


def skip(model: Net) -> None:
    """A layer that has no first values."""
    model.last = torch.nn.utils.skip_init(nn.Linear, 64, 64)
    for param in model.last.parameters():
        nn.init.constant_(param, 0.125)


MODULES.add("`skip_init` inside `ZeroInitContext`", trained, build=changed(skip))


def lora() -> Any:
    config = peft.LoraConfig(r=2, target_modules=["first", "last"], init_lora_weights=False)
    return peft.get_peft_model(Net(), config)


@MODULES.touch("PEFT: LoRA trains", build=lora)
def train_lora(case: Case) -> torch.Tensor:
    return trained(case)


@MODULES.touch("PEFT: `get_peft_model_state_dict`", build=lora)
def lora_state(case: Case) -> object:
    case.train()
    return {
        name: value.clone() for name, value in peft.get_peft_model_state_dict(case.model).items()
    }


@MODULES.touch("PEFT: `disable_adapter()`", build=lora)
def without_lora(case: Case) -> torch.Tensor:
    case.train()
    with case.model.disable_adapter():
        return output(case)


@MODULES.touch("PEFT: `merge_adapter`, `unmerge_adapter`", build=lora)
def merge_lora(case: Case) -> torch.Tensor:
    case.train()
    case.model.merge_adapter()
    found = output(case)
    case.model.unmerge_adapter()
    return found


@MODULES.touch("PEFT: `merge_and_unload`", build=lora, goes_on=False)
def unload_lora(case: Case) -> torch.Tensor:
    case.train()
    return case.model.merge_and_unload()(torch.ones(2, 64, dtype=case.dtype)).detach()


def lora_and_saved() -> Any:
    config = peft.LoraConfig(
        r=2, target_modules=["last"], init_lora_weights=False, modules_to_save=["first"]
    )
    return peft.get_peft_model(Net(), config)


@MODULES.touch(
    "PEFT: `modules_to_save`, `get_peft_model_state_dict`",
    build=lora_and_saved,
    exact=True,
    goes_on=False,
)
def modules_to_save(case: Case) -> object:
    found = peft.get_peft_model_state_dict(case.model)
    return {name: value.clone() for name, value in found.items()}


@MODULES.touch("PEFT: `modules_to_save`, `merge_and_unload`", build=lora_and_saved, goes_on=False)
def unload_saved(case: Case) -> torch.Tensor:
    return unload_lora(case)


def tied_lora() -> Any:
    model = Language()
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    model.lm = peft.get_peft_model(model.lm, config)
    return model


@MODULES.touch(
    "PEFT: `merge_and_unload` of a model with tied embeddings", build=tied_lora, goes_on=False
)
def unload_tied(case: Case) -> torch.Tensor:
    case.train()
    case.model.lm = case.model.lm.merge_and_unload()
    assert case.model.lm.config.tie_word_embeddings
    return output(case)
