"""DeepSpeed's tutorial of ZeRO, its code and its configurations, beside plain PyTorch."""

from __future__ import annotations

import logging

import pytest
import torch

import hetero
from hetero.compat import deepspeed
from hetero.compat.key_table import forget_logged
from tests.support.compat.document import DOCUMENTS
from tests.support.compat.megatron import PLAIN, loss_of, run_megatron

OURS = "from hetero.compat import deepspeed"
# Large, because the gradient of an attention's key bias is zero but for rounding.
EPS = 1e-4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_tutorials_model_and_configurations(
    stage: int, nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The model by its code, with the first values of plain construction, and those that it writes
    with GatheredParameters: the first loss is the same. Trained as its three files say."""
    forget_logged()
    with caplog.at_level(logging.WARNING, "hetero.compat"):
        torch.manual_seed(0)
        model = run_megatron(OURS, stage)
        params = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=params, config=str(DOCUMENTS / f"deepspeed_zero_{stage}.json")
        )
    torch.manual_seed(0)
    plain = run_megatron(PLAIN, stage)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=EPS)
    for seed in range(3):
        loss = loss_of(engine, seed)
        expected = loss_of(plain, seed)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        engine.backward(loss)
        engine.step()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)  # as where no key says another
        adamw.step()
        adamw.zero_grad()
    masters = hetero.masters(model.parameters())
    for found, weight in zip(masters, plain.parameters(), strict=True):
        torch.testing.assert_close(found, weight.detach(), rtol=1e-5, atol=1e-5)
    assert optimizer.engine.config.zero_stage == engine.zero_optimization_stage() == stage
    if stage == 3:
        assert optimizer.engine.config.placement_policy == "cpu"
    said = "\n".join(caplog.messages)
    configured = (DOCUMENTS / f"deepspeed_zero_{stage}.json").read_text()
    for key in ("reduce_bucket_size", "overlap_comm", "stage3_param_persitance_threshold"):
        assert (key in said) == (key in configured)
