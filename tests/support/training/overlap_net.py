"""A net in several placements, whose training is compared with and without overlapped updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetero
from offload.memory.tiers import Tier

WIDTH = 64
STEPS = 3

PLACES: dict[str, dict[str, Any]] = {
    "ram": {"placement_policy": "cpu"},
    # PARAM and GRAD in RAM, optimizer states on NVMe.
    "optim_states": {"placement_policy": "nvme", "host_memory": "2MiB"},
    # All on NVMe, with as few slots and buffers as work.
    "disk": {"placement_policy": "nvme", "host_memory": "400KiB"},
    "emulated": {
        "placement_policy": "nvme",
        "backend": "emulated",
        "debug": {"link_gbps": 4.0},
        "device_memory": "300KiB",
        "host_memory": "600KiB",
    },
}


# A part of all state is at home on DEVICE.
EVERYWHERE = PLACES | {
    "device": {
        "placement_policy": "auto",
        "backend": "emulated",
        "debug": {"link_gbps": 4.0},
        "device_memory": "1MiB",
        "host_memory": "3MiB",
    }
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """Blocks, some in checkpoints, with a tied pair of weights at both ends."""

    def __init__(
        self, blocks: int = 5, kind: str = "plain", tied: bool = True, unused: bool = False
    ) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.outer.weight = self.inner.weight
        if unused:
            self.blocks.insert(2, nn.Linear(WIDTH, WIDTH))
        self.skip = unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            if isinstance(block, nn.Linear):
                continue
            if self.kind == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return self.outer(x)


def untied() -> Net:
    """Whose ends are a chunk each."""
    return Net(tied=False)


def build(
    make: Callable[[], nn.Module], path: Path, place: str, overlap: str = "none", **options: Any
) -> tuple[nn.Module, hetero.HybridAdam]:
    """A managed model, and its optimizer."""
    debug = {"overlap_updates": overlap, **options.pop("debug", {})}
    options = {"dtype": "bf16", "chunk_numel": 8192, **EVERYWHERE[place], **options}
    if options["placement_policy"] == "nvme":
        options["nvme_path"] = str(path)
    torch.manual_seed(0)
    with hetero.ZeroInitContext(options, debug=debug):
        model = make()
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer = hetero.initialize(model, optimizer)
    assert place != "device" or Tier.DEVICE in optimizer.engine.placement.optim_state
    return model, optimizer


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = (model(x).float() - 1).square().mean()
    return loss


def one_step(model: nn.Module, optimizer: hetero.HybridAdam, step: int) -> float:
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def backwards(model: nn.Module, optimizer: hetero.HybridAdam, count: int = STEPS) -> Iterator[int]:
    """Makes so many steps. Yields the number of each when its backward is through."""
    for number in range(count):
        loss_of(model, number).backward()
        yield number
        optimizer.step()
        optimizer.zero_grad()


def result(model: nn.Module, optimizer: hetero.HybridAdam) -> list[torch.Tensor]:
    """All that training makes."""
    found = [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    found += list(model.state_dict().values())
    optimizer.engine.close()
    return found


# Of a model, its optimizer and its overlap_updates: trains, and returns what it has seen.
Loop = Callable[[nn.Module, hetero.HybridAdam, str], Iterable[torch.Tensor]]


def plain_steps(
    model: nn.Module, optimizer: hetero.HybridAdam, overlap: str
) -> Iterable[torch.Tensor]:
    """A Loop of plain steps, and their losses."""
    return [torch.tensor([one_step(model, optimizer, step) for step in range(STEPS)])]


def assert_same_bits(
    path: Path,
    place: str,
    overlaps: Sequence[str],
    loop: Loop = plain_steps,
    make: Callable[[], nn.Module] = Net,
    **options: Any,
) -> None:
    """`loop` sees and makes the same under each of `overlaps` as under "none"."""
    wanted: list[torch.Tensor] | None = None
    for overlap in ("none", *overlaps):
        model, optimizer = build(make, path, place, overlap, **options)
        found = [*loop(model, optimizer, overlap), *result(model, optimizer)]
        wanted = found if wanted is None else wanted
        assert len(found) == len(wanted)
        pairs = enumerate(zip(found, wanted, strict=True))
        assert not [number for number, pair in pairs if not torch.equal(*pair)], overlap


class Begun:
    """Counts the chunks that are updated before step()."""

    def __init__(self, optimizer: hetero.HybridAdam) -> None:
        self._groups = optimizer.engine.chunk_groups
        self.chunks = sum(c.trainable for group in self._groups for c in group.layout.chunks)

    @property
    def now(self) -> int:
        return sum(len(group.updates.speculative) for group in self._groups)


def under_way(optimizer: hetero.HybridAdam) -> int:
    """Chunks whose update was submitted by step() and not waited for."""
    return sum(len(group.updates.under_way) for group in optimizer.engine.chunk_groups)
