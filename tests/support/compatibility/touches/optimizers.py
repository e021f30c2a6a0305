"""The optimizer: groups, schedules, freezing, its state."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn

import hetero
from tests.support.compatibility.touch import Case, Net, Section, changed

OPTIMIZERS = Section("Optimizers")
lr = torch.optim.lr_scheduler
ROOM = {"reserve_memory": "256KiB"}  # for what comes later


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, and learn faster."""
    members = list(model.parameters())
    return [
        {"params": [p for p in members if p.ndim > 1], "weight_decay": 0.1, "lr": 2e-2},
        {"params": [p for p in members if p.ndim < 2]},
    ]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


# Its first layer needs no gradient.
FROZEN = changed(lambda model: model.first.requires_grad_(False))


@OPTIMIZERS.touch("param groups with options of their own", groups=two_groups)
def param_groups(case: Case) -> list[float]:
    case.train()
    return [group["lr"] for group in case.optimizer.param_groups]


@OPTIMIZERS.touch(
    "named parameters: `Optimizer(model.named_parameters())`", groups=nn.Module.named_parameters
)
def named_parameters(case: Case) -> object:
    case.train()
    return case.optimizer.param_groups[0].get("param_names")


@OPTIMIZERS.touch("`group['lr'] = ...` between steps")
def set_options(case: Case) -> None:
    case.train()
    case.optimizer.param_groups[0].update(lr=5e-3, weight_decay=0.1, betas=(0.8, 0.9))
    case.train(2)


def schedule(name: str, make: Any, *values: float) -> None:
    """A schedule's steps between the optimizer's."""

    def use(case: Case) -> list[float]:
        scheduler, rates = make(case.optimizer), []
        for seed in range(3):
            case.train(seed)
            scheduler.step(*values)
            rates.append(case.optimizer.param_groups[0]["lr"])
        return rates

    OPTIMIZERS.add(name, use)


schedule("`CosineAnnealingLR`", lambda o: lr.CosineAnnealingLR(o, 3))
schedule("`ReduceLROnPlateau`", lambda o: lr.ReduceLROnPlateau(o, patience=0), 1.0)
schedule(
    "`SequentialLR` with warm-up",
    lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=1), lr.ConstantLR(o)], [1]),
)


@OPTIMIZERS.touch("`step(closure)`")
def closure(case: Case) -> torch.Tensor:
    case.rank = None

    def compute() -> torch.Tensor:
        case.optimizer.zero_grad()
        loss = case.loss()
        loss.backward()
        return loss

    return case.optimizer.step(compute).detach()


@OPTIMIZERS.touch("`register_step_pre_hook`, `register_step_post_hook`")
def step_hooks(case: Case) -> list[str]:
    seen = set()
    case.optimizer.register_step_pre_hook(lambda *_: seen.add("before"))
    case.optimizer.register_step_post_hook(lambda *_: seen.add("after"))
    case.train()
    return sorted(seen)


@OPTIMIZERS.touch("`requires_grad_(False)` and back")
def freeze(case: Case) -> None:
    case.train()
    case.model.first.requires_grad_(False)
    case.train(2)
    case.model.first.requires_grad_(True)
    case.train(3)


@OPTIMIZERS.touch(
    "unfreezing what was frozen, and `add_param_group`",
    build=FROZEN,
    groups=trainable,
    options=ROOM,
)
def unfreeze(case: Case) -> None:
    case.train()
    case.model.first.requires_grad_(True)
    case.optimizer.add_param_group({"params": list(case.model.first.parameters()), "lr": 5e-3})
    case.train(2)


@OPTIMIZERS.touch("unfreezing what is in no group", on_disk=False, build=FROZEN, groups=trainable)
def unfreeze_in_no_group(case: Case) -> None:
    case.model.first.requires_grad_(True)
    case.train()


@OPTIMIZERS.touch("training what was frozen in the groups", build=FROZEN, options=ROOM)
def unfreeze_in_groups(case: Case) -> None:
    case.train()
    case.model.first.requires_grad_(True)
    case.train(2)


class Later(Net):
    """A layer that gets its place later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return self.more(y) if hasattr(self, "more") else y


@OPTIMIZERS.touch("a new module, and `add_param_group`", build=Later, options=ROOM)
def add_module(case: Case) -> None:
    case.train()
    torch.manual_seed(5)
    case.model.more = nn.Linear(64, 64).to(case.dtype)
    case.optimizer.add_param_group({"params": list(case.model.more.parameters())})
    if not case.managed and case.dtype is torch.bfloat16:
        case.optimizer._keep(list(case.model.more.parameters()))
    case.train(2)


def _resume(case: Case, model_first: bool) -> None:
    case.train()
    file = io.BytesIO()
    torch.save([case.model.state_dict(), case.optimizer.state_dict()], file)
    case.train(2)
    file.seek(0)
    model_state, optimizer_state = torch.load(file)
    if model_first:
        case.model.load_state_dict(model_state)
    case.optimizer.load_state_dict(optimizer_state)
    if not model_first:
        case.model.load_state_dict(model_state)
    case.train(3)


OPTIMIZERS.add(
    "`state_dict()` to `load_state_dict()`, model first", lambda c: _resume(c, model_first=True)
)
OPTIMIZERS.add(
    "`state_dict()` to `load_state_dict()`, optimizer first",
    lambda c: _resume(c, model_first=False),
)


@OPTIMIZERS.touch("`optimizer.state_dict()['state']`: `exp_avg`, `step`")
def states(case: Case) -> object:
    case.train()
    found = {i: s for i, s in case.optimizer.state_dict()["state"].items() if float(s["step"])}
    names = ("step", "exp_avg", "exp_avg_sq")
    return {i: [torch.as_tensor(s[n]).float() for n in names] for i, s in found.items()}


@OPTIMIZERS.touch("`load_state_dict` of `torch.optim.AdamW`'s state")
def load_torchs(case: Case) -> None:
    torch.manual_seed(9)
    model = Net()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    model(torch.ones(2, 64)).square().mean().backward()
    adam.step()
    case.model.load_state_dict(model.state_dict())
    case.optimizer.load_state_dict(adam.state_dict())
    case.optimizer.param_groups[0].update(lr=1e-2, eps=1e-4)


@OPTIMIZERS.touch("`load_state_dict` of absurd values: NaN, a negative `exp_avg_sq`")
def load_absurd(case: Case) -> None:
    case.train()
    state = copy.deepcopy(case.optimizer.state_dict())
    state["state"][0]["exp_avg_sq"] -= 1
    case.optimizer.load_state_dict(state)


@OPTIMIZERS.touch("`optimizer.state[p]['exp_avg']`")
def state_of_one(case: Case) -> torch.Tensor:
    case.train()
    return case.optimizer.state[case.model.first.weight]["exp_avg"].float()


@OPTIMIZERS.touch("`p in optimizer.state`")
def state_has(case: Case) -> bool:
    case.train()
    return case.model.first.weight in case.optimizer.state


@OPTIMIZERS.touch("`optimizer.state.clear()`: moments start anew")
def clear_state(case: Case) -> None:
    case.train()
    case.optimizer.state.clear()


@OPTIMIZERS.touch("`copy.deepcopy(optimizer)`", goes_on=False)
def copy_optimizer(case: Case) -> bool:
    return isinstance(copy.deepcopy(case.optimizer), torch.optim.Optimizer)


@OPTIMIZERS.touch("`torch.optim.SGD(model.parameters())` over managed parameters")
def sgd(case: Case) -> None:
    other = torch.optim.SGD(case.params, lr=0.1, momentum=0.9)
    for seed in range(2):
        other.zero_grad()
        case.backward(seed)
        other.step()


@OPTIMIZERS.touch("a second optimizer of hetero's over the same model", goes_on=False)
def second(case: Case) -> None:
    if case.managed:
        hetero.initialize(case.model, hetero.HybridAdam(case.params), placement_policy="cpu")


@OPTIMIZERS.touch("an optimizer of hetero's whose model was never initialized", goes_on=False)
def unmanaged(case: Case) -> None:
    if case.managed:
        model = Net()
        hetero.HybridAdam(model.parameters()).step()


@OPTIMIZERS.touch("`group['lr'] = -1`")
def negative_rate(case: Case) -> None:
    if case.managed:
        case.backward()
        case.optimizer.param_groups[0]["lr"] = -1
        case.optimizer.step()


class Lookahead:
    """As timm's: every step it draws the parameters back to slow ones, which it keeps in the state
    of the optimizer that it wraps."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """The optimizer's step, and then half of the way."""
        self.optimizer.step()
        for group in self.param_groups:
            for fast in group["params"]:
                if fast.grad is None:
                    continue
                state = self.optimizer.state[fast]
                if "slow" not in state:
                    state["slow"] = torch.empty_like(fast)
                    state["slow"].copy_(fast)
                state["slow"].add_(fast - state["slow"], alpha=0.5)
                fast.copy_(state["slow"])


@OPTIMIZERS.touch("`optimizer.state[p][...] = ...`, as timm's `Lookahead` does")
def lookahead(case: Case) -> None:
    wrapped = Lookahead(case.optimizer)
    for seed in range(3):
        case.optimizer.zero_grad()
        case.backward(seed)
        wrapped.step()
