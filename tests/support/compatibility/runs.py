"""Runs a touch on a managed model and on a plain one, and says in a few words what came of it."""

from __future__ import annotations

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
from tests.support.ranks.processes import RankPool
from tests.support.training.small_net import assert_nothing_is_used

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
# Of what is computed in another order, in fp32.
_CLOSE = {"rtol": 1e-5, "atol": 1e-6}
# In bf16 a master that is another in its last bits may be rounded to the next neighbour, which
# changes the gradients after it: of that the norm, as a part of the norm of what is wanted. An
# update that is lost is three times as much.
_BF16_PART = 0.03
_FEWEST_WORDS, _MOST_WORDS = 7, 16  # of an error
_smallest: dict[Any, int] = {}
_ROUND = 8 << 10  # bytes; least budgets are multiples of so many


def outcome(name: str, column: str) -> str:
    """The cell of a touch and of a column that one process makes."""
    with tempfile.TemporaryDirectory() as folder:
        return _outcome(TOUCHES[name], COLUMNS[column], Path(folder), None)


def outcomes_of_ranks(ranks: RankPool, names: list[str]) -> dict[str, str]:
    """The cells of the touches of these names in the column of two ranks."""
    first, second = ranks.run(_outcomes_of_rank, names)
    return {
        name: cell if cell == second[name] else f"{WRONG}: the ranks: {cell} and {second[name]}"
        for name, cell in first.items()
    }


def _outcomes_of_rank(rank: int, world: int, names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = _outcome(TOUCHES[name], COLUMNS[TWO_RANKS], Path(folder), rank)
    return found


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
    closeness = "exact" if touch.exact else case.closeness
    different = difference(found, wanted, closeness)
    if different or not touch.goes_on:
        return f"{WRONG}: {different}" if different else SAME
    del found, wanted
    assert_nothing_is_used(case.optimizer)
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
    """After training on: parameters, masters, and what an exact touch finds then."""
    wanted = {name: p.detach() for name, p in plain.model.named_parameters()}
    values = {name: p.detach().clone() for name, p in case.model.named_parameters()}
    different = difference(values, wanted, case.closeness)
    if not different:
        members = {n: p for n, p in case.model.named_parameters() if hasattr(p, "_hetero_engine")}
        masters = hetero.masters(list(members.values()))
        fp32 = {name: wanted[name].float() for name in members}
        different = difference(dict(zip(members, masters, strict=True)), fp32, case.closeness)
    if not different and touch.exact:
        for name, value in values.items():
            wanted[name].copy_(value)
        different = difference(touch.use(case), touch.use(plain), "exact")
    return f"{WRONG} after training on: {different}" if different else SAME


def _tried(use: Use, case: Case) -> tuple[object, Exception | None]:
    torch.manual_seed(3)
    try:
        return use(case), None
    except Exception as error:  # the cell
        return None, error.with_traceback(None)


# What was found


def difference(found: object, wanted: object, closeness: str) -> str:
    """What differs, or nothing. `closeness` is of numbers and tensors: "exact", "fp32", "bf16"."""
    if isinstance(wanted, (str, bool, type(None), torch.dtype, type)):
        return "" if found == wanted else f"{found!r} is not {wanted!r}"
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        if list(found) != list(wanted):
            return f"{list(found)} is not {list(wanted)}"
        each = ((key, difference(found[key], wanted[key], closeness)) for key in wanted)
        return next((f"{key}: {text}" for key, text in each if text), "")
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(found) != len(wanted):
            return f"{len(found)} things are not {len(wanted)}"
        parts = enumerate(map(difference, found, wanted, [closeness] * len(wanted)))
        return next((f"[{index}]: {text}" for index, text in parts if text), "")
    if closeness == "bf16":
        return _bf16_difference(torch.as_tensor(found), torch.as_tensor(wanted))
    tolerances = {"rtol": 0.0, "atol": 0.0} if closeness == "exact" else _CLOSE
    try:
        torch.testing.assert_close(found, wanted, equal_nan=True, **tolerances)
    except AssertionError as error:
        return str(error).replace("\n", " ")
    return ""


def _bf16_difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)} is not {tuple(wanted.shape)}"
    norm = wanted.float().norm().item()
    distance = (found.float() - wanted.float()).norm().item()
    close = distance <= _BF16_PART * norm + 1e-3  # (not so if one is NaN)
    return "" if close else f"a difference of norm {distance} from what has norm {norm}"


def said(error: Exception) -> str:
    """The class of an error and the first words of its text, without what varies."""
    if isinstance(error, AssertionError):
        return f"{WRONG}: {error!r}"
    text = str(error).strip().split("\n")[0]
    text = re.sub(r"\([0-9][0-9., x]*\)|\b[0-9][0-9.,]*\b( [KMG]iB| bytes)?|/tmp/\S*", "…", text)
    words = re.split(r"; |\. ", text)[0].split()
    if len(words) < _FEWEST_WORDS:
        words = text.split()
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
        assert not touch.on_disk or Tier.DISK in optimizer.engine.placement.param
    else:
        model, optimizer = made(None)
    dtype = torch.bfloat16 if options["dtype"] == "bf16" else torch.float32
    return Case(model, optimizer, dtype, path, True, rank)


def _with_least_memory(made: Callable[[int | None], Any], key: Any) -> Any:
    """What is made with the least memory that works, so that as much as possible is on disk."""
    if key in _smallest:
        return made(_smallest[key])
    memory = 24 << 10
    while memory < 1 << 20:
        try:
            found = made(memory)
        except hetero.BudgetError as error:
            # More than that it takes to build the model, or at last to train it.
            named = [int(number) for number in re.findall(r"\((\d+) bytes\)", str(error))]
            memory = max(memory + _ROUND, -(-max(named, default=0) // _ROUND) * _ROUND)
        else:
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

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's, which makes the moments of the parameter's dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: value.float() for name, value in state.items()})

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
