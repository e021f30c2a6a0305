"""All native classes in use at once, each from several threads. ThreadSanitizer runs this too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from offload import _native

ROUNDS = 24
REGION = 1 << 18  # bytes of the file that one thread of transfers uses
TILE = 4096  # elements
KIND = _native.UpdateKind("fp32", "fp32")
KEYS = 3  # tiles of one thread of updates
OPTIM_STATE = KIND.optim_state_bytes(TILE)
HYPER = _native.Hyper(lr=1e-2, weight_decay=0.1, decoupled=True)


@pytest.fixture
def engine(kind: str) -> Iterator[_native.IoEngine]:
    engine = _native.IoEngine(kind, queue_depth=4, block_bytes=1 << 16, threads=2)
    yield engine
    engine.close()


def transfer(engine: _native.IoEngine, file: int, offset: int) -> None:
    """Writes and reads a region that nobody else uses, in memory registered now and then."""
    arena = _native.Arena(REGION)
    pins = _native.Pins(1)
    for number in range(ROUNDS):
        tensor = torch.from_dlpack(arena.export(0, REGION, pins, 0))
        tensor.fill_(number)
        if number % 2:
            engine.register(arena)
        half = REGION // 2
        writes = [engine.write(file, arena.address + at, half, offset + at) for at in (0, half)]
        for write in reversed(writes):
            write.wait()
        tensor.zero_()
        engine.read(file, arena.address, REGION, offset).wait()
        assert bool((tensor == number).all())
        engine.unregister(arena)
        assert engine.stats["errors"] == 0
        assert pins[0] == 1
        del tensor
        assert pins[0] == 0
        arena.discard(0, REGION)


def files_come_and_go(engine: _native.IoEngine, directory: Path) -> None:
    buffer = _native.Arena(4096)
    for _ in range(ROUNDS):
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR)
        file = engine.add_file(fd, "short-lived")
        os.close(fd)
        write = engine.write(file, buffer.address, buffer.nbytes, 0)
        engine.remove_file(file)
        assert write.done()


def update(pipeline: _native.StepPipeline, first_key: int, params: torch.Tensor) -> None:
    """Steps of KEYS tiles whose parameters are in RAM and whose states are in the file."""
    grad = torch.full((TILE,), 0.5)
    for _ in range(ROUNDS):
        tasks = [
            _native.StepTask(
                first_key + i,
                _native.Location(address=params[i].data_ptr()),
                _native.Location(address=grad.data_ptr()),
                _native.Location(file_offset=(first_key + i) * OPTIM_STATE),
                [(0, TILE, 0, 0)],
            )
            for i in range(KEYS)
        ]
        pipeline.submit(tasks, [HYPER])
        pipeline.wait_updated()
        pipeline.wait_written(first_key)
        assert pipeline.stats["tasks"] >= KEYS
    pipeline.forget(first_key)


def sum_on_changing_threads() -> None:
    values = torch.ones(200_000)
    for number in range(ROUNDS):
        assert _native.sum_of_squares("fp32", values.data_ptr(), len(values)) == len(values)
        _native.set_threads(1 + number % 3)
        if number % 4 == 3:
            _native.shutdown_workers()


def run_at_once(tasks: list[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(tasks)) as threads:
        for future in [threads.submit(task) for task in tasks]:
            future.result(timeout=300)


def test_everything_at_once(engine: _native.IoEngine, tmp_path: Path) -> None:
    optim_states = tmp_path / "states"
    optim_states.write_bytes(bytes(3 * KEYS * OPTIM_STATE))
    fd = os.open(optim_states, os.O_RDWR)
    state_file = engine.add_file(fd, "states")
    os.close(fd)
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    file = engine.add_file(fd, "transfers")
    os.close(fd)
    buffer_bytes = _native.StepPipeline.buffer_bytes(KIND, TILE, False, False)
    arena = _native.Arena(3 * buffer_bytes)
    pipeline = _native.StepPipeline(engine, state_file, arena, 3, KIND, TILE, False, False)
    params = torch.randn(3, KEYS, TILE, generator=torch.Generator().manual_seed(0))
    untrained = params[0].clone()
    params[1:] = params[0]  # every thread trains the same tiles, under keys of its own
    run_at_once(
        [
            *(lambda i=i: transfer(engine, file, i * REGION) for i in range(2)),
            *(lambda i=i: update(pipeline, i * KEYS, params[i]) for i in range(2)),
            lambda: files_come_and_go(engine, tmp_path),
            *[sum_on_changing_threads] * 2,
        ]
    )
    assert not torch.equal(params[0], untrained)
    update(pipeline, 2 * KEYS, params[2])
    assert torch.equal(params[0], params[2])
    assert torch.equal(params[1], params[2])
    pipeline.close()
