"""An emulated device whose copies fail, that is closed, dropped or forked while it copies."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import hetero
from offload.device.backend import EmulatedBackend
from offload.errors import HeteroError
from tests.support.training.emulated import data, device_cache, emulated, reference
from tests.support.training.loops import batches, build
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("policy", ["cpu", "nvme"])
def test_a_failing_fetch_is_an_error_and_no_end(tmp_path: Path, policy: str) -> None:
    options = emulated(tmp_path, {"placement_policy": policy, "host_memory": "500KiB"})
    options["host_memory"] = None if policy == "cpu" else "500KiB"
    model, optimizer = build(**options, dtype="bf16")
    engine = optimizer.engine
    assert isinstance(engine.backend, EmulatedBackend)
    losses = []
    for tokens in data():
        engine.backend.h2d.inject(3, error=errno.EIO)
        with pytest.raises(OSError, match="from host to device failed"):
            for _ in range(20):  # with a prefetch it may hit what is needed later
                model(input_ids=tokens, labels=tokens)
                device_cache(engine).finish_transfers()
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.backward(loss)
        hetero.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    expected = reference("bf16")
    assert losses == expected.losses
    assert all(map(torch.equal, hetero.masters(model.parameters()), expected.masters))
    engine.close()


@pytest.mark.parametrize("need", ["step", "norm", "grads", "accumulate"])
def test_a_lost_gradient_is_an_error_where_it_is_needed(tmp_path: Path, need: str) -> None:
    model, optimizer = build(
        **emulated(tmp_path, {"placement_policy": "nvme", "host_memory": "500KiB"}), dtype="bf16"
    )
    engine = optimizer.engine
    assert isinstance(engine.backend, EmulatedBackend)
    expected = reference("bf16")
    params = list(model.parameters())
    for step, tokens in enumerate(data()):
        engine.backend.d2h.inject(1, error=errno.EIO)
        model(input_ids=tokens, labels=tokens).loss.backward()
        with pytest.raises(HeteroError, match=r"the gradient of .* did not arrive in RAM: .*copy"):
            if need == "norm":
                hetero.clip_grad_norm_(params, 1.0)
            elif need == "grads":
                hetero.grads(params)
            elif need == "accumulate":
                model(input_ids=tokens, labels=tokens).loss.backward()
                hetero.clip_grad_norm_(params, 1.0)
            else:
                optimizer.step()
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.backward(loss)
        hetero.clip_grad_norm_(params, 1.0)
        assert loss.item() == expected.losses[step]
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, hetero.masters(params), expected.masters))
    engine.close()


def test_closing_in_the_middle_of_it_all(tmp_path: Path) -> None:
    for _ in range(3):
        model, optimizer = build(
            **emulated(tmp_path, {"placement_policy": "nvme", "debug": {"link_gbps": 0.001}}),
            dtype="bf16",
        )
        tokens = batches(1)[0]
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.engine.close()
        assert set(optimizer.engine.ledger.in_use_bytes.values()) == {0}
        del loss


def test_a_model_that_is_dropped_frees_the_same(tmp_path: Path) -> None:
    model, optimizer = build(**emulated(tmp_path, {"placement_policy": "nvme"}), dtype="bf16")
    tokens = batches(1)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    del model, optimizer


def test_a_model_may_be_collected_in_a_thread_of_its_engine(tmp_path: Path) -> None:
    """The garbage collector runs where objects are made, also in threads that close() joins."""
    model, optimizer = build(**emulated(tmp_path, {"placement_policy": "nvme"}), dtype="bf16")
    tokens = batches(1)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    model.itself = model
    engine = optimizer.engine
    ledger, waiter = engine.ledger, device_cache(engine)._backing._copying  # type: ignore[attr-defined]
    collected = threading.Event()

    def collect() -> None:
        gc.collect()
        collected.set()

    gc.disable()
    try:
        del model, optimizer, engine
        waiter.do(collect)
        assert collected.wait(PATIENCE_S)
        until(lambda: not any(ledger.in_use_bytes.values()))
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["close", "outlive"])
def test_a_forked_child_can_end(tmp_path: Path, end: str) -> None:
    model, optimizer = build(
        **emulated(tmp_path, {"placement_policy": "nvme", "debug": {"link_gbps": 0.0005}}),
        dtype="bf16",
    )
    engine = optimizer.engine
    tokens = batches(1)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()  # copies both ways are under way
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own about threads and fork
        child = os.fork()
    if child == 0:
        code = 1
        try:
            engine.close() if end == "close" else engine.lifetime._outlive()
            code = 0
        finally:
            os._exit(code)
    deadline_s = time.monotonic() + PATIENCE_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline_s:
            os.kill(child, 9)
        time.sleep(0.01)
    assert ended[1] == 0
    optimizer.step()
    engine.close()
