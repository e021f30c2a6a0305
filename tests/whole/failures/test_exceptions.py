"""An exception in the middle leaves the engine usable, and stale graphs are refused."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import hetero
from hetero.runtime.step import GradIntake
from tests.support.training.loops import batches, build, train

pytestmark = pytest.mark.usefixtures("nothing_left")

SETTINGS = [
    pytest.param({"placement_policy": "cpu"}, id="cpu"),
    pytest.param({"placement_policy": "nvme", "host_memory": "400KiB"}, id="nvme-all-on-disk"),
]


class Stop(Exception):
    """Raised in the middle."""


def reference(count: int) -> list[torch.Tensor]:
    model, optimizer = build(placement_policy="cpu", dtype="fp32")
    return train(model, optimizer, batches(count), clip=1.0).masters


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception(
    where: str, settings: dict[str, object], tmp_path: Path
) -> None:
    model, optimizer = build(dtype="fp32", nvme_path=str(tmp_path), **settings)
    block = model.transformer.h[1].mlp
    tokens = batches(1)[0]

    def stop(*_: object) -> None:
        raise Stop

    if where == "forward":
        handle = block.register_forward_hook(stop)
        with pytest.raises(Stop):
            model(input_ids=tokens)
    else:
        handle = block.c_fc.weight.register_hook(stop)
        loss = model(input_ids=tokens, labels=tokens).loss
        with pytest.raises(Stop):
            loss.backward()
        del loss
    handle.remove()
    optimizer.zero_grad()
    run = train(model, optimizer, batches(3), clip=1.0)
    assert all(map(torch.equal, run.masters, reference(3)))


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_gradient_that_cannot_be_kept_leaves_the_one_before(
    settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build(dtype="fp32", nvme_path=str(tmp_path), **settings)
    tokens = batches(1)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    before = hetero.grads(model.parameters())

    def stop(*_: object) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(GradIntake, "keep", stop)
        loss = model(input_ids=tokens, labels=tokens).loss
        with pytest.raises(Stop):
            loss.backward()
        del loss
    for grad, old in zip(hetero.grads(model.parameters()), before, strict=True):
        assert grad is not None
        assert old is not None
        assert torch.equal(grad, old)
    optimizer.engine.close()


def test_read_error_in_forward_and_then_on(tmp_path: Path) -> None:
    model, optimizer = build(
        placement_policy="nvme", dtype="fp32", nvme_path=str(tmp_path), host_memory="400KiB"
    )
    tokens = batches(1)[0]
    optimizer.engine.chunk_groups[0].disk.io.inject("read", 0, errno.EIO)
    with pytest.raises(OSError, match=r"read of \d+ bytes .*Input/output error"):
        model(input_ids=tokens)
    run = train(model, optimizer, batches(3), clip=1.0)
    assert all(map(torch.equal, run.masters, reference(3)))


def test_fp16_needs_a_scaled_loss() -> None:
    model, optimizer = build(placement_policy="cpu", dtype="fp16")
    tokens = batches(1)[0]
    with pytest.raises(RuntimeError, match=r"optimizer\.backward\(loss\)"):
        model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.engine.close()


def test_fp16_overflow_skips_the_step(tmp_path: Path) -> None:
    model, optimizer = build(
        placement_policy="nvme",
        dtype="fp16",
        nvme_path=str(tmp_path),
        initial_loss_scale=2.0**28,
        loss_scale_window=2,
    )
    before = hetero.masters(model.parameters())
    tokens = batches(1)[0]
    scale = optimizer.engine.shared.loss_scale
    while scale.good_steps == 0:
        optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
        if scale.good_steps == 0:
            assert all(map(torch.equal, hetero.masters(model.parameters()), before))
    assert scale.skipped_steps > 2
    assert scale.value == 2.0 ** (28 - scale.skipped_steps)
    assert not all(map(torch.equal, hetero.masters(model.parameters()), before))
    states = optimizer.state_dict()["state"]
    assert {state["step"].item() for state in states.values()} == {1.0}
    optimizer.engine.close()
