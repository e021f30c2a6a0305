"""hetero/cli/finetune/examples: sequences, their order, and the weight of each label."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from hetero.cli.finetune.chat import NOT_LEARNED, Example
from hetero.cli.finetune.examples import Collation, Examples, packed, stream
from hetero.cli.job.ranks import Ranks
from tests.support.ecosystem.tiny_models import VOCAB_SIZE, llama_folder

PADDED = Collation(0, None)


def example(size: int, learned: int, seed: int = 0) -> Example:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB_SIZE, (size,), generator=generator).tolist()
    return Example(tokens, [*[NOT_LEARNED] * (size - learned), *tokens[size - learned :]], "here")


@given(st.lists(st.integers(2, 16), min_size=1, max_size=200))
def test_packing_loses_nothing(sizes: list[int]) -> None:
    examples = [example(size, 1, seed) for seed, size in enumerate(sizes)]
    rows = packed(examples, 16)
    assert all(0 < sum(len(each.tokens) for each in row) <= 16 for row in rows)
    assert sorted(map(id, examples)) == sorted(id(each) for row in rows for each in row)
    assert len(rows) <= len(examples)


def test_a_stream_of_texts() -> None:
    rows = stream([[1, 2, 3], [4, 5], [6, 7, 8]], 3, "here")
    assert [row[0].tokens for row in rows] == [[1, 2, 3], [4, 5, 6]]
    assert rows[1][0].labels == [NOT_LEARNED, 5, 6]
    with pytest.raises(ValueError, match="here has 2 tokens, and a sequence 3"):
        stream([[1, 2]], 3, "here")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_examples_see_themselves_alone(attention: str, tmp_path: Path) -> None:
    """The loss of packed sequences is that of each example by itself."""
    folder = llama_folder(tmp_path / "model", positions=32)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    examples = [example(size, size // 2, size) for size in (4, 9, 6, 5, 12)]
    rows = packed(examples, 20)
    assert len(rows) == 2
    whole = model(**Collation(0, torch.float32)(rows)).loss.item()
    losses, count = 0.0, 0
    for each in examples:
        loss = model(**PADDED([[each]])).loss.item()
        losses, count = losses + loss * each.learned, count + each.learned
    assert whole == pytest.approx(losses / count, rel=1e-6)
    padded = model(**PADDED([[each] for each in examples])).loss.item()
    assert padded == pytest.approx(whole, rel=1e-6)


def test_every_label_of_a_step_counts_the_same(tmp_path: Path) -> None:
    """Over micro-batches and ranks, whose gradients are averaged."""
    folder = llama_folder(tmp_path / "model", positions=32)
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = [[example(size, learned, size)] for size, learned in ((4, 1), (9, 7), (6, 2), (5, 3))]
    wanted = model(**PADDED(rows)).loss.item()
    found = []
    for rank in range(2):
        data = Examples(rows, PADDED, "here", 0, 4, Ranks(rank, 2))
        losses = [model(**each.inputs).loss.item() / each.divisor for each in data.step(1, 2)]
        found.append(sum(losses))
    assert sum(found) / 2 == pytest.approx(wanted, rel=1e-6)
    alone = Examples(rows, PADDED, "here", 0, 4).step(1, 4)
    assert sum(each.tokens for each in alone) == 24
    losses = [model(**each.inputs).loss.item() / each.divisor for each in alone]
    assert sum(losses) == pytest.approx(wanted, rel=1e-6)


def test_epochs_are_orders_of_their_own_and_go_on() -> None:
    rows = [[example(3, 1, seed)] for seed in range(5)]
    whole = Examples(rows, PADDED, "here", 7, 6)
    taken = [tuple(whole.step(1, 1)[0].inputs["input_ids"][0].tolist()) for _ in range(10)]
    assert sorted(taken[:5]) == sorted(taken[5:]) == sorted(tuple(row[0].tokens) for row in rows)
    assert taken[:5] != taken[5:]
    first = Examples(rows, PADDED, "here", 7, 6)
    first.step(3, 2)
    second = Examples(rows, PADDED, "here", 7, 6)
    second.load_state_dict(first.state_dict())
    assert tuple(second.step(1, 1)[0].inputs["input_ids"][0].tolist()) == taken[6]
    for other in (Examples(rows[1:], PADDED, "here", 7, 6), Examples(rows, PADDED, "here", 8, 6)):
        with pytest.raises(ValueError, match="the run that is resumed had"):
            other.load_state_dict(first.state_dict())
    larger = Examples(rows, PADDED, "here", 7, 12, Ranks(0, 2))
    with pytest.raises(ValueError, match="took 6 sequences a step, and now it would take 12; give"):
        larger.load_state_dict(first.state_dict())
