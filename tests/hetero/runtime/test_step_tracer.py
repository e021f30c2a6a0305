"""hetero/runtime/step_tracer: what steps are seen to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.planning.trace import Phase
from offload.disk.backing import FileBacking
from offload.memory.tiers import Tier
from tests.support.training.loops import batches, build

pytestmark = pytest.mark.usefixtures("nothing_left")


def start(path: Path, host_memory: str = "1MiB") -> tuple[torch.nn.Module, hetero.HybridAdam]:
    return build(
        placement_policy="auto",
        dtype="bf16",
        chunk_numel=4096,
        nvme_path=str(path),
        host_memory=host_memory,
    )


def test_training_and_evaluation_are_traces_of_their_own(tmp_path: Path) -> None:
    model, optimizer = start(tmp_path, host_memory="300KiB")
    engine = optimizer.engine
    assert Tier.DISK in engine.placement.param
    for step in range(3):
        for tokens in batches(2, seed=step):
            optimizer.backward(model(input_ids=tokens, labels=tokens).loss / 2)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for tokens in batches(5):
                model(input_ids=tokens)
    evaluations = [trace for trace in engine.traces if not trace.micro_batches]
    training = next(trace for trace in reversed(engine.traces) if trace.micro_batches)
    assert training.micro_batches == 2
    assert training.forward_s > 0
    assert training.backward_s > 0
    phases = [use.phase for use in training.uses]
    assert phases.count(Phase.FORWARD) + phases.count(Phase.BACKWARD) == len(phases)
    assert {use.chunk for use in training.uses if use.phase is Phase.BACKWARD}
    gathered = {c for c, tier in enumerate(engine.placement.param) if tier is Tier.DISK}
    assert {use.chunk for trace in evaluations for use in trace.uses} == gathered
    assert all(use.phase is Phase.FORWARD for trace in evaluations for use in trace.uses)
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
        peaks.append(optimizer.engine.traces[-1].peak().host_bytes)
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
        assert engine.grad_factors.unscale(members, factor) == (factor != 1)
        if factor == 1:
            optimizer.step()
        optimizer.zero_grad()
    assert engine.traces[-1].micro_batches == 1
    engine.close()


def test_inference_alone_keeps_nothing(tmp_path: Path) -> None:
    model, optimizer = start(tmp_path)
    tracer = optimizer.engine.tracer
    with torch.no_grad():
        for _ in range(20):
            model(input_ids=batches(1)[0])
    assert tracer._recorder.moments == 0
    assert len(optimizer.engine.traces) == 1
    optimizer.engine.close()


def test_seconds_of_computing_are_without_waits(tmp_path: Path, monkeypatch: Any) -> None:
    """Of a clock that only runs while transfers are waited for nothing is left."""
    model, optimizer = start(tmp_path, host_memory="300KiB")
    engine = optimizer.engine
    now_s = [0.0]
    monkeypatch.setattr(engine.tracer._recorder, "clock", lambda: now_s[0])
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
    trace = engine.traces[-1]
    assert now_s[0] > 10
    assert (trace.forward_s, trace.backward_s) == (0.0, 0.0)
    engine.close()
