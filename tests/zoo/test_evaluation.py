"""Evaluation and generation with the least memory that trains: the tokens of plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.zoo.case import Case, Where
from tests.zoo.pretrained import RECURRENT
from tests.zoo.runs import initialized, least_host_memory


@pytest.mark.parametrize("case", RECURRENT, ids=lambda case: case.name)
def test_recurrent_models(case: Case, tmp_path: Path, nothing_left: None) -> None:
    memory = least_host_memory(case, "fp32", str(tmp_path))
    settings = {"placement_policy": "nvme", "nvme_path": str(tmp_path), "host_memory": memory}
    model, optimizer = initialized(case, "fp32", settings)
    torch.manual_seed(0)
    plain = case.make()
    batch = case.batch(Where(0))
    for each in (model, plain):
        case.loss(each, copy.deepcopy(batch)).backward()
        each.eval()
    optimizer.zero_grad()
    tokens = batch["input_ids"]
    with torch.no_grad():
        found, wanted = model(input_ids=tokens).logits, plain(input_ids=tokens).logits
    assert torch.equal(found, wanted)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(tokens[:, :6], **options)
    assert torch.equal(found, plain.generate(tokens[:, :6], **options))
    assert found.shape == (2, 11)
    optimizer.engine.close()
