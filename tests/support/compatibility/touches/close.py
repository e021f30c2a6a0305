"""Uses after engine.close(), which plain PyTorch has not: they must say so."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from tests.support.compatibility.touch import Case, Section

CLOSE = Section("After `engine.close()`")


def closed(name: str, use: Callable[[Case], object]) -> None:
    def touch(case: Case) -> None:
        if case.managed:
            case.train()
            case.optimizer.engine.close()
            use(case)

    CLOSE.add(name, touch, goes_on=False)


closed("after close: `p.sum()`", lambda c: c.model.last.weight.sum())
closed("after close: `p.data.zero_()`", lambda c: c.model.last.weight.data.zero_())
closed(
    "after close: `p.data = t`", lambda c: setattr(c.model.last.weight, "data", torch.ones(64, 64))
)
closed(
    "after close: `repr(p)`, `p.shape`",
    lambda c: (repr(c.model.last.weight), c.model.last.weight.shape),
)
closed("after close: `model(x)`", lambda c: c.loss())
closed("after close: `optimizer.step()`", lambda c: c.optimizer.step())
closed("after close: `optimizer.state_dict()`", lambda c: c.optimizer.state_dict())
closed("after close: `model.state_dict()`", lambda c: c.model.state_dict()["last.weight"].sum())
closed(
    "after close: `model.load_state_dict()`",
    lambda c: c.model.load_state_dict({"last.weight": torch.ones(64, 64)}, strict=False),
)
closed("after close: `copy.deepcopy(model)`", lambda c: copy.deepcopy(c.model))


@CLOSE.touch("after close: `loss.backward()` of a loss from before", goes_on=False)
def late_backward(case: Case) -> None:
    if case.managed:
        loss = case.loss()
        case.optimizer.engine.close()
        loss.backward()
