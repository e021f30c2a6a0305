"""A tile on a device, and its update compared with the CPU's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from offload import _native
from offload.device.cuda_runtime import CudaRuntime
from offload.device.updater import DeviceTask, Updater
from tests.support.native.update_arrays import (
    TORCH_DTYPES,
    Arrays,
    equal_bits,
    gradients,
    masters,
    param_dtype,
)
from tests.support.native.update_oracle import Hyper

DTYPES = ["fp32", "bf16", "fp16"]
STATE_DTYPES = ["fp32", "bf16", "8bit"]
RULES = ["adam", "lion", "adagrad", "sgd", "muon", "muon_momentum"]
KINDS = [_native.UpdateKind(*k) for k in itertools.product(DTYPES, DTYPES, RULES, STATE_DTYPES)]
TILE = 8192


def hypers(kind: _native.UpdateKind, step: int) -> list[Hyper]:
    """Several of each rule: with weight decay and without."""
    made = [Hyper(lr=1e-2, grad_scale=0.3, step=step)]
    if kind.rule == "adam":
        made.append(Hyper(lr=1e-3, weight_decay=0.1, decoupled=True, step=step))
        made.append(Hyper(lr=1e-3, weight_decay=0.1, bias_correction=False, step=step))
    elif kind.rule == "lion":
        made.append(Hyper(lr=1e-3, weight_decay=0.3, decoupled=True, step=step))
    elif kind.rule == "adagrad":
        made.append(Hyper(lr=1e-2, weight_decay=0.1, lr_decay=0.05, step=step))
    elif kind.rule.startswith("muon"):
        made[0] = dataclasses.replace(made[0], momentum=0.3, nesterov=True)
        decay = {"weight_decay": 0.1, "decoupled": True}
        made.append(Hyper(lr=1e-2, momentum=0.95, lr_scale=2.0, step=step, **decay))
    else:
        made.append(Hyper(lr=1e-2, weight_decay=0.1, momentum=0.9, dampening=0.3, step=step))
        made.append(Hyper(lr=1e-2, momentum=0.8, nesterov=True, step=step))
    return made


def native(hyper: Hyper) -> _native.Hyper:
    return _native.Hyper(**dataclasses.asdict(hyper))


class Tile:
    """A tile as homes have it: parameters, gradients and an optimizer state, in memory of the
    device.
    """

    def __init__(self, runtime: CudaRuntime, kind: _native.UpdateKind) -> None:
        self.kind = kind
        self.param = runtime.empty(TILE * TORCH_DTYPES[param_dtype(kind)].itemsize)
        self.grad = runtime.empty(TILE * TORCH_DTYPES[kind.grad_dtype].itemsize)
        self.optim_state = runtime.empty(kind.optim_state_bytes(TILE))
        self.state_bytes = kind.state_bytes(TILE)
        self.state_at = kind.state_at(0, TILE)

    def parts(self) -> list[torch.Tensor]:
        """[param, master (perhaps empty), states]"""
        end = self.kind.state_at(self.kind.states, TILE)
        states = self.optim_state[self.state_at : end].split(self.state_bytes)
        return [self.param, self.optim_state[: self.state_at], *states]

    def take(self, arrays: Arrays, grad: np.ndarray) -> None:
        master = [] if arrays.master is None else [arrays.master]
        mine = [p for p in self.parts() if len(p)]
        for part, values in zip(mine, [arrays.param, *master, *arrays.states], strict=True):
            part.copy_(torch.from_numpy(values.view(np.uint8)))
        self.grad.copy_(torch.from_numpy(grad.view(np.uint8)))

    def task(self, segments: Sequence[tuple[int, int, int, int]]) -> DeviceTask:
        """An update of these segments."""
        addresses = self.param.data_ptr(), self.grad.data_ptr(), self.optim_state.data_ptr()
        return DeviceTask(*addresses, segments)

    def same(self, arrays: Arrays) -> bool:
        master = [] if arrays.master is None else [arrays.master]
        mine = [p.cpu().numpy() for p in self.parts() if len(p)]
        theirs = [arrays.param, *master, *arrays.states]
        return all(equal_bits(a, b) for a, b in zip(mine, theirs, strict=True))


def check_update(runtime: CudaRuntime, kind: _native.UpdateKind) -> None:
    """Three updates by the device's kernels have the bits of the CPU's."""
    updater = Updater(runtime, kind, TILE)
    arrays, tile = Arrays(kind, masters(TILE)), Tile(runtime, kind)
    index = (1 << 32) - 3000  # numbers are taken modulo 2^32
    for step in range(1, 4):
        grad = gradients(TILE, kind.grad_dtype, seed=step)
        tile.take(arrays, grad)
        all_hypers = hypers(kind, step)
        # Beginnings and ends that groups of four elements do not fit, and gaps.
        cuts = [(0, 1024), (1024, 1), (1025, 6), (1088, 3001), (4096, 4095)]
        if kind.state_dtype == "8bit":
            cuts[2] = (1088, 63)
            cuts[3] = (1152, 2937)
        segments = []
        for number, (first, numel) in enumerate(cuts):
            hyper = number % len(all_hypers)
            arrays.step(grad, all_hypers[hyper], first, first + numel, index)
            segments.append((first, numel, hyper, index + first))
        updater.update([tile.task(segments)], [native(h) for h in all_hypers])
        assert tile.same(arrays)
