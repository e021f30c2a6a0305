"""Tiles of the optimizer's state in RAM and in a file, for tests of the step pipeline."""

import ctypes
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from offload import _native
from tests.support.native.update_oracle import Hyper
from tests.support.own_process import native_threads
from tests.support.waiting import in_time

TILE = 4096  # elements
LIMIT_S = 120  # after which a wait is taken for one without end
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
KIND = _native.UpdateKind("bf16", "bf16")
HYPERS = [Hyper(lr=1e-2, weight_decay=0.1, momentum=0.9), Hyper(lr=1e-3, beta1=0.8)]
SEGMENTS = [
    (0, 960, 0, 7),
    (960, 1777, 1, 9),
    (3008, 1000, 0, 5),
]  # with holes that stay as they are; beginnings are those of state blocks


def hypers(step: int, scale: float = 1.0, decoupled: bool = True) -> list[_native.Hyper]:
    changes = {"step": step, "grad_scale": scale, "decoupled": decoupled}
    return [_native.Hyper(**{**dataclasses.asdict(hyper), **changes}) for hyper in HYPERS]


def ram(array: np.ndarray) -> _native.Location:
    return _native.Location(address=array.ctypes.data)


_older_threads: set[tuple[int, str]] = set()  # which pipeline_threads() leaves out


def leave_out_older_threads() -> None:
    """Pipelines that exist now are of engines that other tests have not closed: whoever tests
    native code alone does not wait for them in pipeline_threads()."""
    _older_threads.clear()
    _older_threads.update(native_threads("hetero-stage", "hetero-step"))


def pipeline_threads() -> list[str]:
    """Names of this process's threads that belong to a pipeline, but for older ones."""

    def names() -> list[str]:
        return [n for _, n in native_threads("hetero-stage", "hetero-step") - _older_threads]

    return in_time(names, [])


class Tiles:
    """Tiles of one dtype in RAM, with random content and gradients."""

    def __init__(
        self,
        count: int,
        dtype: str,
        grad_dtype: str,
        rule: str = "adam",
        state_dtype: str = "fp32",
    ) -> None:
        self.count = count
        self.kind = _native.UpdateKind(dtype, grad_dtype, rule, state_dtype)
        self.param_bytes = TILE * BYTES[dtype]
        self.grad_bytes = TILE * BYTES[grad_dtype]
        self.optim_state_bytes = self.kind.optim_state_bytes(TILE)
        random = np.random.default_rng(0)
        words = {2: np.uint16, 4: np.uint32}
        # Bit patterns of moderate numbers: exponents in the middle, any sign and fraction.
        base = {"fp32": 0x3C000000, "bf16": 0x3C00, "fp16": 0x3000}
        span = {"fp32": 1 << 24, "bf16": 1 << 8, "fp16": 1 << 11}

        def numbers(dtype: str) -> np.ndarray:
            bits = base[dtype] + random.integers(0, span[dtype], TILE)
            return bits.astype(words[BYTES[dtype]])

        self.params = [numbers(dtype) for _ in range(count)]
        self.grads = [numbers(grad_dtype) for _ in range(count)]
        self.optim_states = []
        for param in self.params:
            optim_state = np.zeros(self.optim_state_bytes, np.uint8)
            if dtype == "fp16":
                optim_state[: 4 * TILE].view(np.float32)[:] = param.view(np.float16)
            elif dtype == "bf16":
                optim_state[: 2 * TILE].view(np.uint16)[:] = random.integers(0, 1 << 15, TILE)
            self.optim_states.append(optim_state)

    def tasks_in_ram(self, order: Sequence[int]) -> list[_native.StepTask]:
        return [
            _native.StepTask(
                key,
                ram(self.params[key]),
                ram(self.grads[key]),
                ram(self.optim_states[key]),
                SEGMENTS,
            )
            for key in order
        ]

    def bytes(self) -> bytes:
        return b"".join(
            array.tobytes() for array in [*self.optim_states, *self.params, *self.grads]
        )


class Filed:
    """A copy of tiles whose optim_states, and if wanted parameters and gradients, are in a file."""

    def __init__(
        self,
        tiles: Tiles,
        path: Path,
        kind: str,
        buffers: int,
        param_in_file: bool = False,
        grad_in_file: bool = False,
        checksums: bool = False,
    ) -> None:
        self.tiles = tiles
        self.param_in_file, self.grad_in_file = param_in_file, grad_in_file
        # In an arena, because the engine transfers nothing else.
        param_bytes = tiles.params[0].nbytes
        self.param_arena = _native.Arena(tiles.count * param_bytes)
        self.params = []
        for key, param in enumerate(tiles.params):
            address = self.param_arena.address + key * param_bytes
            memory = (ctypes.c_char * param_bytes).from_address(address)
            self.params.append(np.frombuffer(memory, param.dtype))
            self.params[key][:] = param
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.optim_state_at, self.param_at, self.grad_at = [], [], []
        end = 0
        for offsets, state_kinds in [
            (self.optim_state_at, tiles.optim_states),
            (self.param_at, tiles.params),
            (self.grad_at, tiles.grads),
        ]:
            for state_kind in state_kinds:
                offsets.append(end)
                end += os.pwrite(self.fd, state_kind.tobytes(), end)
        self.spare_optim_state_at = [
            end + at - self.optim_state_at[0] for at in self.optim_state_at
        ]
        self.spare_param_at = [end + at for at in self.param_at]
        shape = (tiles.kind, TILE, param_in_file, grad_in_file)
        self.engine = _native.IoEngine(kind, queue_depth=4, block_bytes=8192)
        members = [(self.fd, str(path))]
        self.file = self.engine.add_striped_file(members, _native.StripeMap([1], 4096), checksums)
        self.arena = _native.Arena(buffers * _native.StepPipeline.buffer_bytes(*shape))
        self.pipeline = _native.StepPipeline(self.engine, self.file, self.arena, buffers, *shape)

    def task(
        self,
        key: int,
        priority: int = 0,
        leaves: str = "",
        state_in_file: bool = True,
        segments: Sequence[tuple[int, int, int, int]] = SEGMENTS,
    ) -> _native.StepTask:
        """An update of a tile. Of what `leaves` names, "state" and "param", the old values stay in
        the file; those of a parameter in RAM are saved there."""
        param, grad = ram(self.params[key]), ram(self.tiles.grads[key])
        state = ram(self.tiles.optim_states[key])
        if self.param_in_file:
            param = _native.Location(file_offset=self.param_at[key])
        if self.grad_in_file:
            grad = _native.Location(file_offset=self.grad_at[key])
        if state_in_file:
            state = _native.Location(file_offset=self.optim_state_at[key])
        state_to = self.spare_optim_state_at[key] if "state" in leaves else -1
        spare = self.spare_param_at[key] if "param" in leaves else -1
        param_to, saved_param = (spare, -1) if self.param_in_file else (-1, spare)
        places = state_to, param_to, saved_param
        return _native.StepTask(key, param, grad, state, segments, priority, *places)

    def tasks(self, order: Sequence[int], priorities: Sequence[int] = ()) -> list[_native.StepTask]:
        """In this order, or by priorities."""
        return [self.task(key, *priorities[place : place + 1]) for place, key in enumerate(order)]

    def speculative(self, order: Sequence[int]) -> list[_native.StepTask]:
        """Tasks that leave what they read as it is."""
        return [self.task(key, leaves="state, param") for key in order]

    def confirm(self, key: int) -> None:
        """The key's speculative update stays."""
        for used, spare in (
            (self.optim_state_at, self.spare_optim_state_at),
            (self.param_at, self.spare_param_at),
        ):
            if used is self.optim_state_at or self.param_in_file:
                used[key], spare[key] = spare[key], used[key]

    def revoke(self, key: int) -> None:
        """The key's speculative update never was."""
        if self.pipeline.take_back(key, 1):
            return
        self.pipeline.forget(key)
        if not self.param_in_file:
            old = self.in_file(self.params[key], self.spare_param_at[key])
            self.params[key][:] = np.frombuffer(old, self.params[key].dtype)

    def in_file(self, array: np.ndarray, offset: int) -> bytes:
        return os.pread(self.fd, array.nbytes, offset)

    def bytes(self) -> bytes:
        tiles = self.tiles
        optim_states = [
            self.in_file(*pair)
            for pair in zip(tiles.optim_states, self.optim_state_at, strict=True)
        ]
        params = [param.tobytes() for param in self.params]
        if self.param_in_file:
            params = [self.in_file(*pair) for pair in zip(self.params, self.param_at, strict=True)]
        grads = [self.in_file(*pair) for pair in zip(tiles.grads, self.grad_at, strict=True)]
        return b"".join(optim_states + params + grads)

    def close(self) -> None:
        self.pipeline.close()
        self.engine.close()
        os.close(self.fd)


FileTiles = Callable[..., Filed]  # of tiles and a number of buffers, as Filed takes them


def train_in_ram(tiles: Tiles, steps: int, scale: float = 1.0, before: int = 0) -> None:
    """So many steps behind those `before`."""
    pipeline = _native.StepPipeline(None, 0, None, 0, tiles.kind, TILE, False, False)
    for step in range(before + 1, before + steps + 1):
        pipeline.submit(tiles.tasks_in_ram(range(tiles.count)), hypers(step, scale))
        pipeline.wait_updated()
    pipeline.close()


def zig_zag(count: int, step: int) -> list[int]:
    order = list(range(count))
    return order if step % 2 else order[::-1]
