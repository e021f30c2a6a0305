"""hetero/runtime/step_watch: what steps are seen to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.planning.step_cost import Computing, Phase
from hetero.runtime.step_watch import MeasuredStep, StepClock
from offload.cache.slot_cache import FileBacking
from tests.support.training.loops import batches, build

pytestmark = pytest.mark.usefixtures("nothing_left")


def start(path: Path, host_memory: str = "1MiB") -> tuple[torch.nn.Module, hetero.HybridAdam]:
    return build(
        placement_policy="auto",
        dtype="bf16",
        chunk_numel=4096,
        nvme_path=str(path),
        host_memory=host_memory,
        debug={"overlap_updates": "none"},
    )


class Machine:
    """A clock and counters that a test moves by hand."""

    def __init__(self) -> None:
        self.now_s = self.waited_s = 0.0
        self.bytes = (0, 0)
        self.steps = StepClock(lambda: self.bytes, lambda: self.waited_s, lambda: self.now_s)

    def phase(self, phase: Phase, seconds: float, waits: float) -> None:
        self.steps.begin(phase)
        self.now_s += seconds
        self.waited_s += waits
        self.steps.begin(None)


def test_a_clock_tells_micro_batches_and_seconds_of_computing() -> None:
    machine = Machine()
    for _ in range(2):
        machine.phase(Phase.FORWARD, seconds=3, waits=1)
        machine.now_s += 100  # whatever goes on between
        machine.phase(Phase.BACKWARD, seconds=5, waits=2)
    made = machine.steps.end_step()
    assert made == MeasuredStep(2, Computing(2 * 2, 2 * 3), 0, 0)
    assert machine.steps.end_step() is None
    machine.phase(Phase.BACKWARD, seconds=5, waits=2)
    assert machine.steps.end_step() is None, "no forward of the whole model"


def test_a_clock_keeps_the_peaks_of_memory() -> None:
    machine = Machine()
    machine.steps.begin(Phase.FORWARD)
    machine.bytes = (500, 40)
    machine.steps.begin(Phase.BACKWARD)
    machine.bytes = (300, 90)
    made = machine.steps.end_step()
    assert made is not None
    assert (made.peak_host_bytes, made.peak_device_bytes) == (500, 90)
    machine.bytes = (1, 2)
    machine.phase(Phase.FORWARD, seconds=1, waits=0)
    made = machine.steps.end_step()
    assert made is not None
    assert (made.peak_host_bytes, made.peak_device_bytes) == (1, 2), "of each step by itself"


def test_evaluation_is_no_part_of_a_step(tmp_path: Path) -> None:
    model, optimizer = start(tmp_path, host_memory="300KiB")
    engine = optimizer.engine
    with torch.no_grad():
        model(input_ids=batches(1)[0])
    engine.watch.tracer.end_step()
    assert engine.watch.tracer.latest is None
    for step in range(3):
        for tokens in batches(2, seed=step):
            optimizer.backward(model(input_ids=tokens, labels=tokens).loss / 2)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for tokens in batches(3):
                model(input_ids=tokens)
    made = engine.watch.tracer.latest
    assert made is not None
    assert made.micro_batches == 2
    assert made.computing.forward_s > 0
    assert made.computing.backward_s > 0
    engine.close()


def test_memory_beside_the_state_is_seen(tmp_path: Path) -> None:
    model, optimizer = start(tmp_path)
    kept: list[torch.Tensor] = []
    nbytes = 64 << 20

    def hook(*_: object) -> None:
        kept.append(torch.ones(nbytes, dtype=torch.uint8))

    peaks = []
    for tokens in batches(4):
        optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(optimizer.engine.watch.tracer.latest.peak_host_bytes)
        kept.clear()
        if len(peaks) == 3:
            model.transformer.h[1].register_forward_hook(hook)
    assert peaks[3] - peaks[2] > nbytes * 3 // 4
    optimizer.engine.close()


def test_a_step_that_is_left_out_is_no_part_of_the_next(tmp_path: Path) -> None:
    """A GradScaler's: its gradients overflow."""
    model, optimizer = start(tmp_path, host_memory="300KiB")
    engine = optimizer.engine
    for factor in (float("inf"), 1.0):
        tokens = batches(1)[0]
        model(input_ids=tokens, labels=tokens).loss.backward()
        members = engine.with_grads(model.parameters())
        assert engine.steps.grad_factors.unscale(members, factor) == (factor != 1)
        if factor == 1:
            optimizer.step()
        optimizer.zero_grad()
    assert engine.watch.tracer.latest.micro_batches == 1
    engine.close()


def test_seconds_of_computing_are_without_waits(tmp_path: Path, monkeypatch: Any) -> None:
    """Of a clock that only runs while transfers are waited for nothing is left."""
    model, optimizer = start(tmp_path, host_memory="300KiB")
    engine = optimizer.engine
    now_s = [0.0]
    monkeypatch.setattr(engine.watch.tracer.step_clock, "clock", lambda: now_s[0])
    monkeypatch.setattr("offload.cache.slot_cache.time.perf_counter", lambda: now_s[0])
    read = FileBacking.read

    class Slow:
        def __init__(self, op: Any):
            self.op = op

        def wait(self) -> None:
            now_s[0] += 1.0
            self.op.wait()

        def cancel(self) -> None:
            self.op.cancel()

    monkeypatch.setattr(FileBacking, "read", lambda *given: Slow(read(*given)))
    for tokens in batches(2):
        optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert now_s[0] > 10
    assert engine.watch.tracer.latest.computing == Computing(0.0, 0.0)
    engine.close()
