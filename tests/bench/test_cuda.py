"""bench/cuda, bench/gpt and bench/cuda_check, as far as they go without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench import cuda, cuda_check
from bench.work.gpt import SHAPES, VOCABULARY, Gpt, fill, quick_init


def test_the_model_is_filled_and_learns() -> None:
    shape = SHAPES["tiny"]
    normal = nn.init.normal_
    with quick_init():
        model = Gpt(shape)
    assert nn.init.normal_ is normal
    fill(model)
    tokens = torch.randint(0, VOCABULARY, (shape.batch_size, shape.seq_len))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(5):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("name", "billions"), [("gpt2-1.3b", 1.3), ("gpt-6b", 6.0)])
def test_shapes(name: str, billions: float) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        numel = sum(p.numel() for p in Gpt(shape).parameters())
    assert numel / 1e9 == pytest.approx(billions, rel=0.05)
    attention = 6 * shape.layers * shape.width * shape.seq_len
    assert shape.flop(numel) == shape.tokens * (6 * numel + attention)


def test_without_a_device_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "cuda_available", lambda: False)
    assert cuda.main([]) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_check.main() == 0
    assert capsys.readouterr().out.count("skipped: ") == 2


def test_the_table_names_what_is_missing() -> None:
    ok = {
        "status": "ok",
        "step_s": 0.5,
        "tokens_per_s": 8000.0,
        "tflop_per_s": 100.0,
        "device_peak_bytes": 1 << 30,
        "rss_bytes": 1 << 30,
    }
    rows = [
        {"model": "m", "contender": "100", **ok, "tokens_per_s": 10000.0},
        {"model": "m", "contender": "10", **ok},
        {"model": "m", "contender": "deepspeed", "status": "not installed"},
    ]
    machine = {
        "date": "d", "cpu": "c", "cores": 1, "isa": "i", "ram_bytes": 1, "kernel": "k",
        "torch": "t", "commit": None,
    }  # fmt: skip
    text = "\n".join(
        cuda._table({"machine": machine, "command": "x", "device": "GPU", "rows": rows})
    )
    assert "hetero, 10 %" in text
    assert " 80%" in text
    assert "not installed" in text
