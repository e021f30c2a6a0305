"""hetero/cli/finetune/chat: templates, and labels on answers alone."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.cli.finetune.chat import NOT_LEARNED, Encoder
from hetero.cli.finetune.formats import Conversation, Message, Text
from tests.support.ecosystem.tiny_tokenizer import CHAT_TEMPLATE, trained_tokenizer

TWO_TURNS = Conversation(
    [
        Message("system", "Be brief."),
        Message("user", "What is ü?"),
        Message("assistant", "A letter."),
        Message("user", "And two?"),
        Message("assistant", "  It is 2 "),
    ],
    "here",
)


def learned_text(tokenizer: Any, conversation: Conversation) -> str:
    example = Encoder(tokenizer, 500).conversation(conversation)
    assert all(
        label in (NOT_LEARNED, token)
        for token, label in zip(example.tokens, example.labels, strict=True)
    )
    return str(tokenizer.decode([each for each in example.labels if each != NOT_LEARNED]))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, "A letter.</s>\n  It is 2 </s>\n"),
        (None, "A letter.</s>\n\n  It is 2 </s>\n\n"),
    ],
)
def test_answers_and_their_ends_are_learned(template: str | None, expected: str) -> None:
    tokenizer = trained_tokenizer(template)
    assert learned_text(tokenizer, TWO_TURNS) == expected
    example = Encoder(tokenizer, 500).conversation(TWO_TURNS)
    said = tokenizer.decode(example.tokens)
    assert said.index("Be brief.") < said.index("What is ü?") < said.index("A letter.")


def test_a_long_conversation_is_cut() -> None:
    tokenizer = trained_tokenizer(CHAT_TEMPLATE)
    whole = Encoder(tokenizer, 500).conversation(TWO_TURNS)
    first = next(i for i, label in enumerate(whole.labels) if label != NOT_LEARNED)
    cut = Encoder(tokenizer, first + 1).conversation(TWO_TURNS)
    assert cut.tokens == whole.tokens[: first + 1]
    assert cut.learned == 1
    count = len(whole.tokens)
    with pytest.raises(
        ValueError, match=f"^here: of {count} tokens the first {first} have no word"
    ):
        Encoder(tokenizer, first).conversation(TWO_TURNS)


def test_texts_end() -> None:
    tokenizer = trained_tokenizer()
    tokens = Encoder(tokenizer, 500).text(Text("The fox.", "here"))
    assert tokenizer.decode(tokens) == "The fox.</s>"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages | length }}", "writes message 3 differently when others follow"),
        ("{{ raise_exception('no system, please') }}", "refuses it: no system, please"),
        ("{% for", "the chat template of the tokenizer refuses it"),
    ],
)
def test_templates_that_do_not_fit(template: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^here: .*{said}.*give --chat-template FILE"):
        Encoder(trained_tokenizer(template), 500).conversation(TWO_TURNS)


def test_tokenizers_that_do_not_fit() -> None:
    tokenizer = trained_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no eos_token"):
        Encoder(tokenizer, 500)

    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="the tokenizer Slow does not say which characters"):
        Encoder(Slow(), 500)
