"""Copies: of models and parameters, state dicts, files."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.support.compatibility.touch import Case, Net, Section, changed

COPIES = Section("State dicts, copies, averages of weights, files")


def fresh(case: Case) -> Net:
    """A plain model with other values."""
    torch.manual_seed(9)
    return Net().to(case.dtype)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@COPIES.touch("`model.state_dict()`", exact=True)
def state_dict(case: Case) -> object:
    return {name: value.clone() for name, value in case.model.state_dict().items()}


@COPIES.touch("`model.state_dict(keep_vars=True)`", exact=True)
def state_dict_of_variables(case: Case) -> object:
    found = case.model.state_dict(keep_vars=True)
    return [all(isinstance(p, nn.Parameter) for p in found.values()), found["last.bias"].sum()]


@COPIES.touch("`load_state_dict`")
def load(case: Case) -> object:
    return str(case.model.load_state_dict(fresh(case).state_dict()))


@COPIES.touch("`load_state_dict(strict=False)` of a part")
def load_a_part(case: Case) -> object:
    found = case.model.load_state_dict({"scale": torch.ones(1), "odd": torch.ones(1)}, strict=False)
    return [list(found.missing_keys), list(found.unexpected_keys)]


@COPIES.touch("`load_state_dict` of wrong shapes or names")
def load_misfit(case: Case) -> None:
    case.model.load_state_dict({"scale": torch.ones(3)}, strict=False)


@COPIES.touch("`load_state_dict(assign=True)`")
def load_by_assignment(case: Case) -> None:
    case.model.load_state_dict(fresh(case).state_dict(), assign=True)


@COPIES.touch("`torch.save(model.state_dict())`, `torch.load`", exact=True)
def save_state_dict(case: Case) -> object:
    return saved(case.model.state_dict())


@COPIES.touch("`torch.save(layer.state_dict())`, its size", exact=True)
def save_layer(case: Case) -> object:
    file = io.BytesIO()
    torch.save(case.model.last.state_dict(), file)
    return file.tell() // 4096


@COPIES.touch("`torch.save(model)`")
def save_model(case: Case) -> object:
    return values(saved(case.model, weights_only=False))


@COPIES.touch("`torch.save(p)`, `pickle.dumps(p)`", exact=True)
def save_parameter(case: Case) -> object:
    weight = case.model.last.weight
    return [saved(weight).detach(), pickle.loads(pickle.dumps(weight)).detach()]


@COPIES.touch("`copy.deepcopy(p)`, `copy.copy(p)`", exact=True)
def copy_parameter(case: Case) -> object:
    found = [copy.deepcopy(case.model.last.weight), copy.copy(case.model.last.weight)]
    return [each.detach().clone() for each in found]


def saved(thing: object, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


@COPIES.touch("`safetensors` `save_model`, `load_model`")
def save_safetensors(case: Case) -> object:
    case.train()
    file = case.path / f"{'managed' if case.managed else 'plain'}.safetensors"
    safetensors.torch.save_model(case.model, str(file))
    found = safetensors.torch.load_file(str(file))
    case.train(2)
    safetensors.torch.load_model(case.model, str(file))
    return {name: found[name] for name in sorted(found)}


@COPIES.touch("`safetensors` `save_file(model.state_dict())`", exact=True)
def save_safetensors_file(case: Case) -> object:
    found = safetensors.torch.load(safetensors.torch.save(case.model.state_dict()))
    return {name: found[name] for name in sorted(found)}


@COPIES.touch("`copy.deepcopy(model)`: a plain model that trains")
def copy_model(case: Case) -> object:
    return _trained_copy(case, copy.deepcopy(case.model))


@COPIES.touch("`pickle.dumps(model)`: a plain model that trains")
def pickle_model(case: Case) -> object:
    return _trained_copy(case, pickle.loads(pickle.dumps(case.model)))


def _trained_copy(case: Case, made: Net) -> object:
    adam = torch.optim.SGD(made.parameters(), lr=0.1)
    case.rank = None
    case.loss(model=made).backward()
    adam.step()
    return values(made)


def copy_layer(model: Net) -> None:
    """A layer becomes a deep copy of another, while the model is built."""
    model.last = copy.deepcopy(model.first)


COPIES.add(
    "`copy.deepcopy(layer)` inside `ZeroInitContext`",
    lambda c: c.train(),
    build=changed(copy_layer),
)


def average(name: str, update: Any) -> None:
    """An average of the weights over three steps."""

    def use(case: Case) -> list[torch.Tensor]:
        means = [p.detach().clone() for p in case.params]
        for seed in range(3):
            case.train(seed)
            with torch.no_grad():
                update(means, case.params)
        return means

    COPIES.add(name, use)


average(
    "EMA: `mean.lerp_(p)`", lambda ms, ps: [m.lerp_(p, 0.1) for m, p in zip(ms, ps, strict=True)]
)
average(
    "EMA: `mean.mul_().add_(p)`",
    lambda ms, ps: [m.mul_(0.9).add_(p, alpha=0.1) for m, p in zip(ms, ps, strict=True)],
)
average(
    "EMA: `mean.data.add_(0.1 * p.data)`",
    lambda ms, ps: [m.data.mul_(0.9).add_(0.1 * p.data) for m, p in zip(ms, ps, strict=True)],
)
average(
    "EMA: `torch._foreach_lerp_(means, params)`", lambda ms, ps: torch._foreach_lerp_(ms, ps, 0.1)
)


@COPIES.touch("`AveragedModel(model)`, `update_parameters`")
def averaged(case: Case) -> object:
    mean = AveragedModel(case.model)
    for seed in range(3):
        case.train(seed)
        mean.update_parameters(case.model)
    return [values(mean.module), mean(torch.ones(2, 64, dtype=case.dtype)).detach()]


@COPIES.touch("`AveragedModel(multi_avg_fn=get_ema_multi_avg_fn())`, `update_bn`")
def averaged_by_foreach(case: Case) -> object:
    mean = AveragedModel(case.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for seed in range(2):
        case.train(seed)
        mean.update_parameters(case.model)
    update_bn([torch.ones(2, 64, dtype=case.dtype)], mean)
    return values(mean.module)


@COPIES.touch("weights of an average copied back: `p.data.copy_(mean)`")
def copy_back(case: Case) -> None:
    means = [p.detach().clone() for p in case.params]
    case.train()
    for param, mean in zip(case.params, means, strict=True):
        param.data.copy_(mean)
