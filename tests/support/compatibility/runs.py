"""Runs a touch on a managed model and on a plain one, and says in a few words what came of it."""

from __future__ import annotations

import contextlib
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetero
from offload.memory.tiers import Tier
from tests.support.compatibility.touch import Case, Touch, Use
from tests.support.compatibility.touches import SECTIONS

SAME = "same"
WRONG = "wrong"  # in no cell: what a test fails with

# The columns and what they are. `ranks`: the touch is made by two processes at once.
COLUMNS: dict[str, dict[str, Any]] = {
    "cpu": {"placement_policy": "cpu", "dtype": "fp32"},
    "nvme": {"placement_policy": "nvme", "dtype": "fp32"},
    "nvme bf16": {"placement_policy": "nvme", "dtype": "bf16"},
    "two ranks": {"placement_policy": "cpu", "dtype": "fp32", "rank_timeout_s": 20.0},
}
TWO_RANKS = "two ranks"
TOUCHES = {touch.name: touch for section in SECTIONS for touch in section.touches}
assert len(TOUCHES) == sum(len(section.touches) for section in SECTIONS), "names are not unique"

# eps is large, so that an update is a smooth function of the gradient.
_OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.0}
# Of what is computed in another order; of bf16 also the rounding of another neighbour.
_TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-6, "atol": 1e-3},
}
_MOST_WORDS = 16  # of an error
_smallest: dict[Any, int] = {}


def outcome(name: str, column: str) -> str:
    """The cell of a touch and of a column that one process makes."""
    with tempfile.TemporaryDirectory() as folder:
        return _outcome(TOUCHES[name], COLUMNS[column], Path(folder), None)


def outcome_of_rank(rank: int, world: int, name: str) -> str:
    """This rank's cell in the column of two ranks; both ranks call it."""
    with tempfile.TemporaryDirectory() as folder:
        return _outcome(TOUCHES[name], COLUMNS[TWO_RANKS], Path(folder), rank)


def joined(cells: list[str]) -> str:
    """The cell of two ranks, which must find the same."""
    return cells[0] if len(set(cells)) == 1 else f"{WRONG}: the ranks differ: {cells}"


def _outcome(touch: Touch, options: dict[str, Any], path: Path, rank: int | None) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case = _managed(touch, options, path, rank)
        except hetero.HeteroError as error:
            return said(error)
        try:
            return _compared(touch, case, _plain(touch, case.dtype, path))
        finally:
            case.optimizer.engine.close()


def _compared(touch: Touch, case: Case, plain: Case) -> str:
    wanted, plain_error = _tried(touch.use, plain)
    found, error = _tried(touch.use, case)
    if error is not None or plain_error is not None:
        return _errors_compared(error, plain_error)
    close = _TOLERANCES[case.dtype]
    different = difference(found, wanted, {"rtol": 0, "atol": 0} if touch.exact else close)
    if different or not touch.goes_on:
        return f"{WRONG}: {different}" if different else SAME
    del found
    errors = [_tried(lambda each: each.train(7), each)[1] for each in (case, plain)]
    if any(errors):
        cell = _errors_compared(*errors)
        return cell if cell == SAME else f"{cell} (at the next step)"
    return _values_compared(touch, case, plain)


def _errors_compared(error: Exception | None, plain_error: Exception | None) -> str:
    if error is None:
        return f"{WRONG}: plain PyTorch raises {plain_error!r}"
    same = type(error) is type(plain_error) and not isinstance(error, hetero.HeteroError)
    return SAME if same else said(error)


def _values_compared(touch: Touch, case: Case, plain: Case) -> str:
    """After training on: masters, parameters, and what an exact touch finds then."""
    close = _TOLERANCES[case.dtype]
    wanted = {name: p.detach() for name, p in plain.model.named_parameters()}
    values = {name: p.detach().clone() for name, p in case.model.named_parameters()}
    different = difference(values, wanted, close)
    if not different:
        members = {n: p for n, p in case.model.named_parameters() if hasattr(p, "_hetero_engine")}
        masters = hetero.masters(list(members.values()))
        fp32 = {name: wanted[name].float() for name in members}
        different = difference(dict(zip(members, masters, strict=True)), fp32, close)
    if not different and touch.exact:
        different = difference(touch.use(case), touch.use(plain), close)
    return f"{WRONG} after training on: {different}" if different else SAME


def _tried(use: Use, case: Case) -> tuple[object, Exception | None]:
    torch.manual_seed(3)
    try:
        return use(case), None
    except Exception as error:  # the cell
        return None, error.with_traceback(None)


# What was found


def difference(found: object, wanted: object, close: dict[str, float]) -> str:
    """What differs, or nothing. Numbers and tensors are compared with the tolerances of `close`."""
    if isinstance(wanted, (str, bool, type(None), torch.dtype, type)):
        return "" if found == wanted else f"{found!r} is not {wanted!r}"
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        if list(found) != list(wanted):
            return f"{list(found)} is not {list(wanted)}"
        each = ((key, difference(found[key], wanted[key], close)) for key in wanted)
        return next((f"{key}: {text}" for key, text in each if text), "")
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(found) != len(wanted):
            return f"{len(found)} things are not {len(wanted)}"
        parts = enumerate(map(difference, found, wanted, [close] * len(wanted)))
        return next((f"[{index}]: {text}" for index, text in parts if text), "")
    try:
        torch.testing.assert_close(found, wanted, equal_nan=True, **close)
    except AssertionError as error:
        return str(error).replace("\n", " ")
    return ""


def said(error: Exception) -> str:
    """The class of an error and the first words of its text, without what varies."""
    if isinstance(error, AssertionError):
        return f"{WRONG}: {error!r}"
    text = str(error).strip().split("\n")[0]
    text = re.sub(r"\([0-9][0-9., x]*\)|\b[0-9][0-9.,]*\b( [KMG]iB| bytes)?|/tmp/\S*", "…", text)
    words = re.split(r"; |\. ", text)[0].split()
    if len(words) > _MOST_WORDS:
        words = [*words[:_MOST_WORDS], "…"]
    return f"`{type(error).__name__}`: {' '.join(words).replace('|', '/')}"


# The cases


def _managed(touch: Touch, options: dict[str, Any], path: Path, rank: int | None) -> Case:
    def made(host_memory: int | None) -> tuple[Any, Any]:
        torch.manual_seed(0)
        with hetero.ZeroInitContext(
            nvme_path=str(path), chunk_numel=4096, host_memory=host_memory, **all_options
        ):
            model = touch.build()
        return hetero.initialize(model, hetero.HybridAdam(touch.groups(model), **_OPTIONS))

    all_options = {**options, **touch.options}
    if options["placement_policy"] == "nvme":
        model, optimizer = _with_least_memory(made, (touch.build, touch.groups, options["dtype"]))
        assert Tier.DISK in optimizer.engine.placement.param
    else:
        model, optimizer = made(None)
    dtype = torch.bfloat16 if options["dtype"] == "bf16" else torch.float32
    return Case(model, optimizer, dtype, path, True, rank)


def _with_least_memory(made: Callable[[int | None], Any], key: Any) -> Any:
    """What is made with the least memory that works, so that as much as possible is on disk."""
    if key in _smallest:
        return made(_smallest[key])
    for memory in range(64 << 10, 1 << 20, 8 << 10):
        with contextlib.suppress(hetero.BudgetError):
            found = made(memory)
            _smallest[key] = memory
            return found
    raise AssertionError("it needs more than expected")


def _plain(touch: Touch, dtype: torch.dtype, path: Path) -> Case:
    torch.manual_seed(0)
    model = touch.build()
    adam = torch.optim.AdamW if dtype is torch.float32 else AdamWWithMasters
    optimizer = adam(touch.groups(model.to(dtype)), **_OPTIONS)
    return Case(model, optimizer, dtype, path, False)


class AdamWWithMasters(torch.optim.AdamW):
    """AdamW on fp32 masters, of which the parameters are the rounding.

    A parameter that was written to is its own master from then on, where it is not the rounding
    of the one before.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._masters: dict[nn.Parameter, torch.Tensor] = {}
        super().__init__(*args, **options)
        for group in self.param_groups:
            self._keep(group["params"])

    def _keep(self, params: list[nn.Parameter]) -> None:
        for param in params:
            before = self._masters.get(param, param.detach().float())
            same = before.to(param.dtype) == param.detach()
            self._masters[param] = torch.where(same, before, param.detach().float())

    def step(self, closure: Any = None) -> Any:
        """One update."""
        loss = closure() if closure is not None else None
        params = [p for group in self.param_groups for p in group["params"]]
        self._keep(params)
        grads = [p.grad for p in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad, param.data = None, self._masters[param]
            param.grad = None if grad is None else grad.float()
        super().step()
        for param, grad in zip(params, grads, strict=True):
            self._masters[param] = param.data
            param.grad, param.data = None, param.data.to(torch.bfloat16)
            param.grad = grad
        return loss
