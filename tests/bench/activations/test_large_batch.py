"""bench.activations.large_batch: bytes of parameters and gradients, and the same training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.activations.large_batch import main, summarize

TINY = ["--layers", "2", "--width", "64", "--heads", "2", "--vocabulary", "256", "--seq-len", "64"]


def sample(step_s: float, state: float, activations: float) -> dict[str, Any]:
    moved = {
        "activations_read": activations,
        "activations_written": activations,
        "disk_read": activations + state / 2,
        "disk_write": activations + state / 2,
    }
    return {"step_s": step_s, "peak_bytes": 1, "bytes_per_step": moved, "losses": [1.0]}


def test_parameters_and_gradients_are_what_each_micro_batch_adds() -> None:
    # 20 bytes of optimizer state a step, 5 of parameters and gradients a micro-batch.
    found = summarize(
        [
            {
                "one micro-batch": sample(1.0, 25, 0),
                "micro-batches": sample(4.0, 20 + 8 * 5, 0),
                "large batch": sample(3.0, 25, 7),
            }
        ],
        8,
    )
    assert [each["param_and_grad_bytes"] for each in found.values()] == [5, 40, 5]
    assert found["large batch"]["of_micro_batches"] == 0.75
    assert found["large batch"]["activation_bytes"] == 14


@pytest.mark.extra
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = ("--host-memory", "16MiB", "--activation-memory", "12MiB")
    assert main([*TINY, *memory, "--steps", "1", "--path", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = result["results"]
    assert list(found) == ["one micro-batch", "micro-batches", "large batch"]
    # The same tokens, in parts and at once; activations in bf16.
    assert found["large batch"]["losses"] == pytest.approx(
        found["micro-batches"]["losses"], rel=0.01
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "fact"),
    [
        ("--factor", "1", "--factor must be 2 or more"),
        ("--host-memory", "lots", "--host-memory: cannot read 'lots'"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, fact: str
) -> None:
    assert main([*TINY, "--path", str(tmp_path), option, value]) == 2
    assert fact in capsys.readouterr().err.splitlines()[-1]
