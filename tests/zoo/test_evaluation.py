"""Evaluation and generation with the least memory that trains: the tokens of plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zoo.case import Case, Where
from tests.zoo.pretrained import GPT2, RECURRENT
from tests.zoo.runs import initialized, least_host_memory

GREEDY = {"do_sample": False}


@pytest.mark.parametrize(
    ("case", "ways"),
    [
        *((case, [GREEDY]) for case in RECURRENT),
        (GPT2, [GREEDY, {"do_sample": True}, {"num_beams": 2, **GREEDY}]),
    ],
    ids=lambda it: getattr(it, "name", ""),
)
def test_as_plain_torch(
    case: Case, ways: list[dict[str, Any]], tmp_path: Path, nothing_left: None
) -> None:
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
    options = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
    for way in ways:
        both = []
        for each in (model, plain):
            torch.manual_seed(0)
            both.append(each.generate(tokens[:, :6], **options, **way))
        assert torch.equal(*both)
        assert both[0].shape == (2, 11)
    optimizer.engine.close()
