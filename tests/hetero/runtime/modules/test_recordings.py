"""What records or transforms a model gets an error that says what to do, and training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import hetero
from tests.support.training.small_net import SETTINGS, Net, managed

X = torch.ones(3, 64)
ON_DISK = SETTINGS[1].values[0]


def of_params(model: torch.nn.Module, detach: bool) -> Any:
    params = {name: p.detach() if detach else p for name, p in model.named_parameters()}
    loss = grad(lambda params, x: functional_call(model, params, (x,)).sum())
    return vmap(loss, (None, 0))(params, X)


CASES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "script": torch.jit.script,
    "script-of-a-layer": lambda model: torch.jit.script(model.first),
    "trace": lambda model: torch.jit.trace(model, X),
    "export": lambda model: torch.export.export(model, (X,), strict=False),
    "make_fx": lambda model: make_fx(lambda x: model(x))(X),
    "grad": lambda model: grad(lambda x: model(x).sum())(X),
    "vjp": lambda model: vjp(model, X),
    "jvp": lambda model: jvp(model, (X,), (X,)),
    "jacrev": lambda model: jacrev(model)(X),
    "vmap-of-grad": lambda model: vmap(grad(lambda x: model(x).sum()))(X),
    "vmap-of-grad-of-parameters": lambda model: of_params(model, False),
    "vmap-of-grad-of-detached": lambda model: of_params(model, True),
}


def step(model: Net, optimizer: hetero.HybridAdam) -> list[torch.Tensor]:
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_it_is_refused_and_a_copy_does(tmp_path: Path) -> None:
    model, optimizer = managed(ON_DISK, tmp_path)
    other, others = managed(ON_DISK, tmp_path)
    copied, built = copy.deepcopy(model), Net()
    built.load_state_dict(model.state_dict())
    for name, record in CASES.items():
        scripts = name.startswith("script")
        said = r"build the model anew" if scripts else r"copy\.deepcopy\(model\)"
        with pytest.raises(hetero.HeteroError, match=said):
            record(model)
        record(built if scripts else copied)
    assert all(map(torch.equal, step(model, optimizer), step(other, others)))
    for each in (optimizer, others):
        each.engine.close()


def test_a_hook_has_no_name() -> None:
    """Whoever asks for one politely gets none."""
    model, optimizer = managed({"placement_policy": "cpu"}, Path())
    hook = next(iter(model._forward_pre_hooks.values()))
    assert not hasattr(hook, "__name__")
    assert getattr(hook, "__name__", "none") == "none"
    optimizer.engine.close()
