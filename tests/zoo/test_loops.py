"""Common training loops, each beside the same loop in plain PyTorch, on disk and in RAM.

Both optimizers compute the same formula in another order of rounding, so weights differ by some
2^-24 of themselves after a step, and gradients, which are below 1 for most elements, by about as
much. With eps = 1e-4 an update follows that with a slope of at most lr / eps = 30: some 2e-6 a step
at the worst. 1e-5 is a three-hundredth of what one update moves a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetero
from tests.support.training.plain_adam import OPTIONS
from tests.support.training.smallest import smallest_host_memory
from tests.zoo.case import WIDTH, Where, ballasted, vectors
from tests.zoo.handwritten import Attention, Bare, Block

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.parametrize("policy", ["cpu", "nvme"]),
]
Made = Callable[..., tuple[nn.Module, Any]]


@pytest.fixture
def managed(policy: str, tmp_path: Path) -> Made:
    """Makes a model and its optimizer under hetero, mostly on disk if the policy is "nvme"."""

    def build(
        make: Callable[[], nn.Module], more_bytes: int = 0
    ) -> tuple[nn.Module, hetero.HybridAdam]:
        def attempt(host_memory: int | None) -> tuple[nn.Module, hetero.HybridAdam]:
            torch.manual_seed(0)
            with hetero.ZeroInitContext(
                placement_policy=policy,
                nvme_path=str(tmp_path),
                host_memory=host_memory,
                chunk_numel=4096,
                dtype="fp32",
            ):
                model = ballasted(make)()
            return hetero.initialize(model, hetero.HybridAdam(model.parameters(), **OPTIONS))

        least = smallest_host_memory(lambda: attempt(96 << 10)) if policy == "nvme" else None
        model, optimizer = attempt(None if least is None else least + more_bytes)
        engine = optimizer.engine
        absent = [m for m in engine.params.in_order() if not engine.params.is_resident(m.chunk)]
        assert bool(absent) == (policy == "nvme")
        return model, optimizer

    return build


def plain(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.AdamW]:
    """The same in plain PyTorch."""
    torch.manual_seed(0)
    model = ballasted(make)()
    return model, torch.optim.AdamW(model.parameters(), **OPTIONS)


class Chain(nn.Module):
    """Its parts one after the other; unlike nn.Sequential it does not run the ballast."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    """The masters are the plain model's weights to rounding, and some weight has moved."""
    for (name, weight), master in zip(
        expected.named_parameters(), hetero.masters(model.parameters()), strict=True
    ):
        torch.testing.assert_close(
            master,
            weight.detach(),
            rtol=1e-5,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(vectors(Where(step))).square().mean()


def test_adversaries(managed: Made) -> None:
    """Two models with two optimizers, one's output the other's input, and a graph used twice."""

    def make_generator() -> nn.Module:
        return Chain(Block(), nn.Linear(WIDTH, WIDTH))

    def make_critic() -> nn.Module:
        return Chain(Block(), nn.Linear(WIDTH, 1))

    ours = managed(make_generator), managed(make_critic)
    theirs = plain(make_generator), plain(make_critic)

    def train(pairs: Any) -> None:
        (generator, of_generator), (critic, of_critic) = pairs
        for step in range(3):
            noise, real = vectors(Where(step)), vectors(Where(step, 1))
            fake = generator(noise)
            of_critic.zero_grad()
            (F.softplus(critic(fake.detach())) + F.softplus(-critic(real))).mean().backward()
            of_critic.step()
            of_generator.zero_grad()
            scores = critic(fake)
            F.softplus(-scores).mean().backward(retain_graph=True)
            (0.1 * scores.square().mean()).backward()
            of_generator.step()

    train(ours)
    train(theirs)
    for (model, optimizer), (expected, _) in zip(ours, theirs, strict=True):
        assert_same(model, expected)
        optimizer.engine.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(managed: Made, mode: Callable[[], Any]) -> None:
    """TransformerEncoder of plain torch has an operator of its own for evaluation."""
    model, optimizer = managed(Attention)
    expected, adam = plain(Attention)
    for step in range(3):
        for each, optim in ((model, optimizer), (expected, adam)):
            each.train()
            torch.manual_seed(step)
            loss_of(each, step).backward()
            optim.step()
            optim.zero_grad()
            each.eval()
        with mode():
            x = vectors(Where(step, 1))
            torch.testing.assert_close(model(x), expected(x), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model.encoder(x), expected.encoder(x), rtol=1e-4, atol=1e-5)
    assert_same(model, expected)
    optimizer.engine.close()


def test_losses_of_parameters_inside_of_gathered(managed: Made) -> None:
    def make() -> nn.Module:
        return Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    model, optimizer = managed(make)
    expected, adam = plain(make)
    for param in model.parameters():
        with hetero.gathered(param):
            param.square().sum().backward()
    sum(p.square().sum() for p in expected.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    adam.step()
    assert_same(model, expected)
    optimizer.engine.close()


def test_parts_built_outside_the_context(policy: str, tmp_path: Path) -> None:
    """A backbone that was there before, and a head built inside."""

    def build() -> nn.Module:
        return Chain(*(Block() for _ in range(6)))

    torch.manual_seed(0)
    expected = Chain(build(), Bare())
    adam = torch.optim.AdamW(expected.parameters(), **OPTIONS)
    torch.manual_seed(0)
    backbone = build()
    with hetero.ZeroInitContext(
        dtype="fp32",
        placement_policy=policy,
        nvme_path=str(tmp_path),
        chunk_numel=4096,
        host_memory="600KiB" if policy == "nvme" else None,
    ):
        model = Chain(backbone, Bare())
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), **OPTIONS))
    for each, optim in ((model, optimizer), (expected, adam)):
        for step in range(3):
            loss_of(each, step).backward()
            optim.step()
            optim.zero_grad()
    assert_same(model, expected)
    optimizer.engine.close()
