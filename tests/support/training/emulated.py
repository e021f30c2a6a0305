"""Options of a small model on an emulated device, and the same training in RAM."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

import hetero
from offload.cache.slot_cache import SlotCache
from offload.memory.tiers import Tier
from tests.support.training.loops import Run, batches, build, train

SMALL = "300KiB"  # of the device: hardly more than needed
LARGE = "64MiB"
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"placement_policy": "cpu"},
    "cpu-no-prefetch": {"placement_policy": "cpu", "debug": {"prefetch": False}},
    "nvme": {"placement_policy": "nvme"},
    "nvme-all-on-disk": {"placement_policy": "nvme", "host_memory": "500KiB"},
    "auto-all-tiers": {
        "placement_policy": "auto",
        "device_memory": "1200KiB",
        "host_memory": "1500KiB",
    },
    "auto-all-on-device": {"placement_policy": "auto", "device_memory": LARGE},
    "all-on-device": {"placement_policy": "cuda", "device_memory": LARGE},
}


def emulated(path: Path, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    given = {"device_memory": SMALL, "chunk_numel": 4096, "nvme_path": str(path)}
    return {"backend": "emulated", "initial_loss_scale": 256.0, **given, **settings, **more}


def data(accumulate: int = 1) -> list[torch.Tensor]:
    """Four steps, or two of several micro-batches."""
    return batches(4 if accumulate == 1 else 2 * accumulate)


def trained(model: torch.nn.Module, optimizer: hetero.HybridAdam, accumulate: int = 1) -> Run:
    return train(model, optimizer, data(accumulate), accumulate, clip=1.0)


@cache
def reference(dtype: str, accumulate: int = 1) -> Run:
    """The same training in RAM."""
    built = build(placement_policy="cpu", dtype=dtype, initial_loss_scale=256.0)
    return trained(*built, accumulate)


def assert_same_bits(
    path: Path, settings: dict[str, Any], dtype: str, accumulate: int, **more: Any
) -> hetero.Engine:
    """A training with these settings has the bits of that in RAM, and passes no budget."""
    options = emulated(path, settings, dtype=dtype, **more)
    if dtype == "fp32":
        for name in ("device_memory", "host_memory"):
            if str(options.get(name, "")).endswith("KiB"):
                options[name] = f"{2 * int(options[name][:-3])}KiB"
    model, optimizer = build(**options)
    engine = optimizer.engine
    on_device = [tier is Tier.DEVICE for tier in engine.placement.param]
    assert trained(model, optimizer, accumulate).same_bits(reference(dtype, accumulate))
    assert engine.ledger.peak_bytes["device"] <= (engine.ledger.budget_bytes["device"] or 0)
    assert (engine.traffic.h2d > 0) == (engine.traffic.d2h > 0) == (not all(on_device))
    assert set(engine.ledger.in_use_bytes.values()) == {0}
    return engine


def device_cache(engine: hetero.Engine, chunk_group: int = 0) -> SlotCache:
    cache = engine.chunk_groups[chunk_group].params.copies.cache
    assert cache is not None
    return cache
