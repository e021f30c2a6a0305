"""Optimizers of hetero's beside torch's: a net of the same values each, trained side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hetero
from tests.support.training.small_net import Settings, loss_of

# The optimizers of a net, as hetero has them or torch.
Make = Callable[[Any, bool], list[Any]]


class Pair:
    """A managed net in fp32, and the same in plain PyTorch."""

    def __init__(
        self, net: Callable[[], Any], make: Make, settings: Settings, path: Path, **more: Any
    ) -> None:
        torch.manual_seed(0)
        self.plain = net()
        self.theirs = make(self.plain, False)
        torch.manual_seed(0)
        model = net()
        ours = make(model, True)
        given = {"nvme_path": str(path), "chunk_numel": 4096, "dtype": "fp32", **settings, **more}
        self.model, self.ours = hetero.initialize(model, ours, **given)
        assert self.ours is ours
        self.engine = ours[0].engine

    def sides(self) -> list[tuple[Any, list[Any]]]:
        return [(self.model, self.ours), (self.plain, self.theirs)]

    def step(
        self,
        seed: int,
        loss: Callable[[Any, int], torch.Tensor] = loss_of,
        which: slice = slice(None),
    ) -> None:
        """A backward through all, and the steps of some; the others' gradients are cleared."""
        for model, optimizers in self.sides():
            loss(model, seed).backward()
            for optimizer in optimizers[which]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    def assert_same(self, tolerance: float = 0.0) -> None:
        """Parameters and momentum; where torch has no momentum, ours is not used."""

        def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)

        params = [param.detach() for param in self.plain.parameters()]
        for found, wanted in zip(hetero.masters(self.model.parameters()), params, strict=True):
            assert_close(found, wanted)
        for own, its in zip(self.ours, self.theirs, strict=True):
            theirs = its.state_dict()["state"]
            for index, state in own.state_dict()["state"].items():
                found = state.get("momentum_buffer", torch.zeros_like(state["master"]))
                buffer = theirs.get(index, {}).get("momentum_buffer")
                if buffer is None:
                    assert not found.any()
                else:
                    assert_close(found, buffer)

    def close(self) -> None:
        self.assert_same()
        self.engine.close()
