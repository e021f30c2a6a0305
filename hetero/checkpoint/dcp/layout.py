"""What the keys of a DCP checkpoint say: the layout of torch's get_state_dict().

That is {"model": {NAME: tensor}, "optim": {"state": {NAME: {STATE: tensor}}, "param_groups":
[{"params": [NAME, ...], OPTION: value}]}}, whose keys are the paths joined by dots. Read are also
"optimizer" for "optim", the flattened optimizer state (StateDictOptions.flatten_optimizer_state_
dict), whose options are by parameter, and a model's state dict alone, without anything around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero.checkpoint.dcp.metadata import DcpMetadata

MODEL, OPTIMIZER = "model", "optim"
STEP = "step"
_OPTIMIZER_NAMES = (OPTIMIZER, "optimizer")


@dataclass(frozen=True)
class Layout:
    """The keys of a checkpoint by what they are.

    Attributes:
        model: parameters and buffers, by name.
        states: by parameter and state; its step, too.
        groups: of each param group the options.
        by_param: options by parameter, where the optimizer's state is flattened.
        others: keys of what is neither.
    """

    model: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: dict[int, dict[str, str]] = field(default_factory=dict)
    by_param: dict[str, dict[str, str]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, metadata: DcpMetadata) -> Layout:
        """That of a checkpoint's keys."""
        made, paths = cls(), metadata.paths
        keys = (*metadata.tensors, *metadata.objects)
        # (A flat state dict may have names that begin with "model.", too.)
        nested = {paths[key][0] for key in keys if len(paths.get(key, ())) > 1}
        if not paths:
            nested = {key.partition(".")[0] for key in keys}
        is_flat = MODEL not in nested and not nested & {*_OPTIMIZER_NAMES}
        for key in keys:
            top, _, rest = key.partition(".")
            is_tensor = key in metadata.tensors
            if (is_flat or (top == MODEL and MODEL in nested)) and is_tensor:
                made.model[key if is_flat else rest] = key
            elif top in _OPTIMIZER_NAMES and top in nested:
                made._add_optimizer_key(key, rest, paths.get(key, ()), is_tensor)
            else:
                made.others.append(key)
        return made

    def _add_optimizer_key(
        self, key: str, rest: str, path: Sequence[str | int], is_tensor: bool
    ) -> None:
        kind, _, what = rest.partition(".")
        first, _, last = what.rpartition(".")
        if kind == "state" and first and is_tensor:
            self.states.setdefault(first, {})[last] = key
        elif kind == "param_groups" and first:
            in_list = isinstance(path[2], int) if len(path) > 2 else "." not in what[:-1]
            if not path:
                in_list = first.isdecimal()
            if in_list and first.isdecimal():
                self.groups.setdefault(int(first), {})[last] = key
            else:
                self.by_param.setdefault(first, {})[last] = key
        else:
            self.others.append(key)

    def option_keys(self) -> list[str]:
        """Those of all options."""
        found = [*self.groups.values(), *self.by_param.values()]
        return [key for options in found for key in options.values()]


def param_groups(layout: Layout, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The param groups, "params" by name; `values` are those of layout.option_keys().

    Where options are by parameter, those with the same ones are a group. Raises ValueError.
    """
    if layout.groups:
        made = []
        for number in sorted(layout.groups):
            group = {name: _plain(values[key]) for name, key in layout.groups[number].items()}
            names = group.get("params")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"param group {number} of the checkpoint has no names in params")
            made.append(group)
        return made
    by_options: dict[str, dict[str, Any]] = {}
    for name, keys in layout.by_param.items():
        options = {option: _plain(values[key]) for option, key in keys.items()}
        group = by_options.setdefault(repr(sorted(options.items())), {**options, "params": []})
        group["params"].append(name)
    return list(by_options.values())


def _plain(value: Any) -> Any:
    """An option; a learning rate may be a tensor."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value
