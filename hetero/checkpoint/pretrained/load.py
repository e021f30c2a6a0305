"""Loading a folder of Hugging Face's into a managed model, a part of a parameter at a time.

All names, shapes and dtypes are compared, on all ranks, before anything is changed; each rank then
reads what it keeps, a few MiB at a time. Values become masters unrounded. Tensors that transformers
converts as it loads (fused experts, renamed layers) are for from_pretrained() inside
ZeroInitContext.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.api.access import engine_of
from hetero.api.whole_state import Piece, fill_parts
from hetero.checkpoint.manifest import master_key
from hetero.checkpoint.pretrained.safetensors_checkpoint import SafetensorsCheckpoint
from hetero.checkpoint.pretrained.tensor_names import NameMatch, named_tensors, unwrapped
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from offload.errors import CheckpointError, StoreError
from offload.interrupts import uninterrupted

_MOST_NAMES = 20  # in an error


@uninterrupted
@torch.no_grad()
def load_pretrained(
    model: torch.nn.Module, folder: str | os.PathLike[str], strict: bool = True
) -> Any:
    """Loads a folder of Hugging Face's into the parameters and buffers of a managed model.

    Values go from the files to where parameters live, a few MiB at a time, so the model may be
    larger than RAM; each rank reads what it keeps. All ranks must call it. Values become the
    masters, unrounded, and parameters their rounding; the optimizer's states stay. Names are those
    of the model's state_dict(), with or without its `base_model_prefix`; of tied ones the folder
    need have one.

    What transformers converts as it loads (fused experts, renamed layers) is not converted: load
    such a folder with from_pretrained() inside hetero.ZeroInitContext.

    Args:
        model: one that went through hetero.initialize().
        folder: has model.safetensors, or model.safetensors.index.json and its files; or one
            safetensors file. Each rank may have a copy of its own.
        strict: False: names that only one of model and folder has are returned instead of raised.

    Returns:
        what torch's load_state_dict() does: a named tuple of `missing_keys` and `unexpected_keys`.

    Raises:
        ValueError: names are missing or unexpected, or a tensor has another shape or a dtype that
            does not fit. Nothing is changed then.
        CheckpointError: there is no such folder, its files are damaged, or ranks have different
            ones. Nothing is changed, unless a file has become shorter meanwhile.
        StoreError: a file cannot be read. If that came late, part of the model is loaded.
        UnmanagedParameterError: the model is not managed.
        HeteroError: another rank met one of these.
    """
    model = unwrapped(model)
    engine = engine_of(model.parameters())
    engine.check_usable()
    world, same_class = engine.world, (CheckpointError, StoreError)
    # (The texts are alike on all ranks; their folders may have different names.)
    what = "load a pretrained model"
    plan = world.together(what, lambda: _Plan.of(engine, model, Path(folder), strict), same_class)
    world.require_equal({"the tensors": plan.digest}, "the folders of a pretrained model")
    with world.telling_failures("hetero.load_pretrained()"):
        failure = plan.load(engine)
    world.all_or_none(failure, what, same_class)
    return torch.nn.modules.module._IncompatibleKeys(plan.names.missing, plan.names.unexpected)


@dataclass(frozen=True)
class _Plan:
    """What is read into what: into managed parameters, and into tensors that are not managed.

    `digest` is the same on all ranks if their folders have the same tensors.
    """

    stored: SafetensorsCheckpoint
    names: NameMatch
    managed: Mapping[ManagedParam, str]
    plain: list[tuple[torch.Tensor, str]]
    digest: str

    @classmethod
    def of(cls, engine: Engine, model: torch.nn.Module, folder: Path, strict: bool) -> _Plan:
        """Raises what load_pretrained() says, before anything is changed."""
        tensors, stored = named_tensors(model), SafetensorsCheckpoint(folder)
        names = NameMatch(model, tensors, stored.tensors)
        _check(engine, tensors, stored, names, strict)
        managed: dict[ManagedParam, str] = {}
        plain: dict[int, tuple[torch.Tensor, str]] = {}
        for name, tensor in tensors.items():
            if name not in names.stored:
                continue
            found, known = names.stored[name], engine.params.known(tensor)
            if known is not None:
                first = managed.setdefault(known, found)
            else:
                _, first = plain.setdefault(id(tensor), (tensor, found))
            if first != found:
                _require_alike(stored, first, found)
        facts = repr([(name, s.path.name, s.entry, s.offset) for name, s in stored.tensors.items()])
        digest = hashlib.sha256(facts.encode()).hexdigest()
        return cls(stored, names, managed, list(plain.values()), digest)

    def load(self, engine: Engine) -> Exception | None:
        """Replaces the values; returns what reading met, after which nothing more is replaced."""

        def fill(piece: Piece) -> None:
            begin, end = piece.part.in_param.start, piece.part.in_param.stop
            values = self.stored.read(master_key(self.managed[piece.managed]), begin, end)
            piece.set_master(values.to(piece.values.device, torch.float32))

        failure = fill_parts(engine, self.managed, fill)
        try:
            for tensor, name in [] if failure else self.plain:
                tensor.detach().copy_(self.stored.whole(master_key(name)))
        except (CheckpointError, StoreError) as error:
            failure = error
        if not isinstance(failure, (CheckpointError, StoreError)):
            return failure
        return type(failure)(f"{failure}; part of the model is loaded: load it again")


def _check(
    engine: Engine,
    tensors: Mapping[str, torch.Tensor],
    stored: SafetensorsCheckpoint,
    names: NameMatch,
    strict: bool,
) -> None:
    """Raises ValueError with all that does not fit."""
    found = {name: each.entry for name, each in stored.tensors.items()}
    wrong: list[str] = []
    for name, stored_name in names.stored.items():
        entry, tensor = found[stored_name], tensors[name]
        if entry.shape != tuple(tensor.shape):
            wrong.append(f"{name}: {entry.shape} in the folder, {tuple(tensor.shape)} in the model")
        elif not _fits(entry.dtype, tensor, engine.params.known(tensor) is not None):
            wrong.append(f"{name}: {entry.dtype} in the folder, {tensor.dtype} in the model")
    problems = [("of another shape or dtype", wrong)]
    if strict:
        missing = [f"{name}: {tuple(tensors[name].shape)}" for name in names.missing]
        unexpected = [f"{name}: {found[name].shape}" for name in names.unexpected]
        problems += [("only in the model", missing), ("only in the folder", unexpected)]
    if not any(lines for _, lines in problems):
        return
    text = "".join(f"\n  {len(lines)} {what}:{_listed(lines)}" for what, lines in problems if lines)
    raise ValueError(
        f"{stored.path} does not fit the model; nothing is changed.{text}\n"
        f"strict=False passes over names that only one of them has. Where transformers converts a "
        f"folder as it loads it, call from_pretrained() inside hetero.ZeroInitContext instead"
    )


def _fits(dtype: torch.dtype, tensor: torch.Tensor, managed: bool) -> bool:
    return dtype.is_floating_point if managed else torch.can_cast(dtype, tensor.dtype)


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - _MOST_NAMES} more"] if len(lines) > _MOST_NAMES else []
    return "".join(f"\n    {line}" for line in [*lines[:_MOST_NAMES], *more])


def _require_alike(stored: SafetensorsCheckpoint, one: str, other: str) -> None:
    """Raises ValueError if names that are tied in the model have different values in the files."""
    pairs = zip(stored.parts(master_key(one)), stored.parts(master_key(other)), strict=True)
    same = stored.tensors[one].entry.dtype == stored.tensors[other].entry.dtype
    if not same or not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
        raise ValueError(
            f"{one!r} and {other!r} are one tensor in the model, and have different values in "
            f"{stored.path}; build the model without tying them"
        )
