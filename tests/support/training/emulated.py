"""Options of a small model on an emulated device, and the same training in RAM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hetero
from offload.cache.slot_cache import SlotCache
from tests.support.training.loops import Run, batches, build, train

SMALL = "300KiB"  # of the device: hardly more than needed
LARGE = "64MiB"
REFERENCES: dict[Any, Run] = {}


def emulated(path: Path, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    given = {"device_memory": SMALL, "chunk_numel": 4096, "nvme_path": str(path)}
    return {"backend": "emulated", "initial_loss_scale": 256.0, **given, **settings, **more}


def reference(dtype: str, accumulate: int) -> Run:
    """The same training in RAM."""
    key = dtype, accumulate
    if key not in REFERENCES:
        model, optimizer = build(placement_policy="cpu", dtype=dtype, initial_loss_scale=256.0)
        REFERENCES[key] = train(model, optimizer, batches(6), accumulate, clip=1.0)
    return REFERENCES[key]


def device_cache(engine: hetero.Engine, chunk_group: int = 0) -> SlotCache:
    cache = engine.chunk_groups[chunk_group].params.copies.cache
    assert cache is not None
    return cache
