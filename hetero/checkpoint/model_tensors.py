"""What a checkpoint keeps of a model and its optimizers: tensors by name, whatever the chunks.

Keys are "model/NAME" for the fp32 master of a trained parameter, the value of a frozen one and
buffers; "optimizer/NAME/STATE" for a state of the rule; "data/RANK/NUMBER" for what a rank alone
has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetero.api.optimizers import (
    HybridAdagrad,
    HybridAdam,
    HybridLion,
    HybridMuon,
    HybridSGD,
)
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam


def master_key(name: str) -> str:
    """Of a parameter's master or value, or of a buffer."""
    return f"model/{name}"


def state_key(name: str, state: str) -> str:
    """Of a state of the rule."""
    return f"optimizer/{name}/{state}"


def data_key(rank: int, number: int) -> str:
    """Of a tensor that a rank alone has."""
    return f"data/{rank}/{number}"


def name_of(key: str) -> str:
    """The parameter's name in "model/NAME" and "optimizer/NAME/STATE"."""
    kind, _, rest = key.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of an engine's model, by their first names in it.

    Attributes:
        params: the managed parameters, in the order of chunks.
        aliases: of these, their other names.
        plain: buffers that state_dict() has, and parameters that are not managed.
        names: of all parameters, by their id().
    """

    params: dict[str, ManagedParam]
    aliases: dict[str, tuple[str, ...]]
    plain: dict[str, torch.Tensor]
    names: dict[int, str]

    @classmethod
    def of(cls, engine: Engine) -> ModelTensors:
        """Those of an engine's model now."""
        names: dict[int, list[str]] = {}
        plain: dict[str, torch.Tensor] = {}
        for name, param in engine.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
            if engine.params.known(param) is None:
                plain[name] = param.detach()
        for prefix, module in engine.model.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    plain[f"{prefix}.{name}" if prefix else name] = buffer.detach()
        params, aliases = {}, {}
        for chunk_group in engine.chunk_groups:
            for m in chunk_group.members:
                if engine.params.known(m.param) is m and id(m.param) in names:
                    first, *others = names[id(m.param)]
                    params[first], aliases[first] = m, tuple(others)
        return cls(params, aliases, plain, {key: found[0] for key, found in names.items()})


# The states of each rule, in the order of the optimizer state.
STATE_NAMES = {
    each.rule: each.state_names
    for each in (HybridAdam, HybridLion, HybridAdagrad, HybridSGD, HybridMuon)
}
