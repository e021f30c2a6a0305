"""hetero/cli/finetune/data: templates, and labels on answers alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ecosystem.tiny_tokenizer import CHAT_TEMPLATE, trained_tokenizer
from tests.support.late import late

data = late("hetero.cli.finetune.data")

TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is ü?"},
    {"role": "assistant", "content": "A letter."},
    {"role": "user", "content": "And two?"},
    {"role": "assistant", "content": "  It is 2 "},
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, "A letter.</s>\n  It is 2 </s>\n"),
        (None, "A letter.</s>\n\n  It is 2 </s>\n\n"),
    ],
)
def test_answers_and_their_ends_are_learned(template: str | None, expected: str) -> None:
    """With a template of the tokenizer, and with the default."""
    tokenizer: Any = trained_tokenizer(template or data.DEFAULT_TEMPLATE)
    tokens, labels = data.answer_labels(tokenizer, TWO_TURNS, 500)
    assert all(
        label in (data.NOT_LEARNED, token) for token, label in zip(tokens, labels, strict=True)
    )
    assert tokenizer.decode([each for each in labels if each != data.NOT_LEARNED]) == expected
    said = tokenizer.decode(tokens)
    assert said.index("Be brief.") < said.index("What is ü?") < said.index("A letter.")


def test_a_long_conversation_is_cut() -> None:
    tokenizer = trained_tokenizer(CHAT_TEMPLATE)
    whole, labels = data.answer_labels(tokenizer, TWO_TURNS, 500)
    first = next(i for i, label in enumerate(labels) if label != data.NOT_LEARNED)
    cut, cut_labels = data.answer_labels(tokenizer, TWO_TURNS, first + 1)
    assert cut == whole[: first + 1]
    assert sum(label != data.NOT_LEARNED for label in cut_labels) == 1
    with pytest.raises(ValueError, match=f"^of {len(whole)} tokens the first {first} have no word"):
        data.answer_labels(tokenizer, TWO_TURNS, first)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages | length }}", "writes message 3 differently when others follow"),
        ("{{ raise_exception('no system, please') }}", "refuses it: no system, please"),
        ("{% for", "the chat template refuses it"),
    ],
)
def test_templates_that_do_not_fit(template: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}.*--chat-template FILE"):
        data.answer_labels(trained_tokenizer(template), TWO_TURNS, 500)
