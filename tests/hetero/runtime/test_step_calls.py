"""How much Python a training step is: calls of functions, and the files that they are in."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import hetero

# Of hetero and offload in the main thread; generators count at each resumption. Now some 4,840:
# which chunks are read ahead depends on what is written by then.
MOST_CALLS = 5_000
MOST_FILES = 30
LAYERS = 8
PACKAGES = tuple(f"{Path(hetero.__file__).parents[1]}/{name}/" for name in ("hetero", "offload"))


def test_calls_of_a_step_on_nvme(tmp_path: Path) -> None:
    """Some 600 for each layer's forward, backward, clipping and update, which read and write it."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(LAYERS)))
    model, optimizer = hetero.initialize(
        layers,
        hetero.Adam(layers.parameters(), lr=1e-3),
        dtype="bf16",
        placement_policy="nvme",
        host_memory="300KiB",
        nvme_path=str(tmp_path),
    )
    inputs = torch.randn(4, 128)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if (
            event == "call"
            and ("/hetero/" in name or "/offload/" in name)
            and "/tests/" not in name
        ):
            calls[name] += 1

    def step() -> None:
        loss = model(inputs).float().pow(2).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(6):  # what is learned from steps is known then
        step()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    optimizer.engine.close()
    assert calls.total() <= MOST_CALLS, calls.most_common(20)
    assert len(calls) <= MOST_FILES, sorted(calls)
