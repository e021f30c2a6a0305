"""The names that a model's tensors have in its state_dict(), and in folders of Hugging Face's.

What transformers says about names is read from attributes of the model, if it has them:
`base_model_prefix`, `_tied_weights_keys`, and those that name what may be missing or left over.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

import torch


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model that torch.compile() has wrapped, or the model."""
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, torch.nn.Module)
    return inner


def named_tensors(model: torch.nn.Module, known: Container[int]) -> dict[str, torch.Tensor]:
    """Parameters and buffers by the names of state_dict(), themselves; tied ones by each name.

    Raises ValueError if state_dict() has something else than tensors with the id()s `known`.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            raise ValueError(
                f"the model's state_dict() has {name!r}, which is no parameter and no buffer; "
                f"a folder of tensors cannot have it"
            )
        found[name] = tensor
    return found


def names_to_write(model: torch.nn.Module, names: dict[str, torch.Tensor]) -> list[str]:
    """Those of `names` that a folder has.

    Of tied parameters the names are left out that the model says from_pretrained() ties again.
    """
    left_out = {name for name in names if _matches(name, _listed(model, "_keys_to_ignore_on_save"))}
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in names.items():
        if name not in left_out:
            by_tensor.setdefault(id(tensor), []).append(name)
    for tied in (found for found in by_tensor.values() if len(found) > 1):
        declared = [name for name in tied if _is_declared_tied(model, name)]
        left_out.update(declared if len(declared) < len(tied) else declared[1:])
    return [name for name in names if name not in left_out]


def _is_declared_tied(model: torch.nn.Module, name: str) -> bool:
    for prefix, module in model.named_modules():
        inside = f"{prefix}." if prefix else ""
        keys = _listed(module, "_tied_weights_keys")
        if name.startswith(inside) and _matches(name[len(inside) :], keys):
            return True
    return False


def _listed(module: torch.nn.Module, attribute: str) -> list[str]:
    found = getattr(module, attribute, None)
    return [key for key in found if isinstance(key, str)] if isinstance(found, Iterable) else []


def _matches(name: str, patterns: list[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


class NameMatch:
    """Which name of a folder belongs to which name of a model.

    A checkpoint of a base model fits the model with a head, and the other way round: their names
    differ by the model's `base_model_prefix`.

    Attributes:
        stored: the folder's name by the model's.
        missing: names of the model that the folder lacks; not those tied to others that it has.
        unexpected: names of the folder that the model has no place for.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        names: dict[str, torch.Tensor],
        stored_names: Iterable[str],
    ) -> None:
        self.stored: dict[str, str] = {}
        self.unexpected: list[str] = []
        prefix = getattr(model, "base_model_prefix", "")
        inside = f"{prefix}." if isinstance(prefix, str) and prefix else ""
        others = []
        for name in stored_names:
            if name in names:
                self.stored[name] = name
            else:
                others.append(name)
        for name in others:
            candidates = [inside + name]
            if inside and name.startswith(inside):
                candidates.insert(0, name[len(inside) :])
            fitting = [c for c in candidates if c in names and c not in self.stored]
            if fitting:
                self.stored[fitting[0]] = name
            elif not _matches(name, _listed(model, "_keys_to_ignore_on_load_unexpected")):
                self.unexpected.append(name)
        present = {id(names[name]) for name in self.stored}
        ignored = _listed(model, "_keys_to_ignore_on_load_missing")
        self.missing = [
            name
            for name, tensor in names.items()
            if id(tensor) not in present and not _matches(name, ignored)
        ]
