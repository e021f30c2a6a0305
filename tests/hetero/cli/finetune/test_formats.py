"""hetero/cli/finetune/formats: alpaca, sharegpt, messages and text."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.cli.finetune.formats import Conversation, Message, Text, parse
from hetero.cli.finetune.records import Record

SAID = {"from": "human", "value": "Q"}
ANSWERED = {"from": "gpt", "value": "A"}


@pytest.mark.parametrize(
    ("content", "roles_and_contents"),
    [
        ({"instruction": "Q", "output": "A"}, [("user", "Q"), ("assistant", "A")]),
        (
            {"system": "S", "instruction": "Q", "input": "I", "output": "A"},
            [("system", "S"), ("user", "Q\n\nI"), ("assistant", "A")],
        ),
        ({"conversations": [SAID, ANSWERED]}, [("user", "Q"), ("assistant", "A")]),
        (
            {"system": "S", "conversations": [SAID, ANSWERED, SAID, ANSWERED]},
            [("system", "S"), *[("user", "Q"), ("assistant", "A")] * 2],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "Q"},
                    {"role": "assistant", "content": "A"},
                ]
            },
            [("user", "Q"), ("assistant", "A")],
        ),
    ],
)
def test_conversations(content: Any, roles_and_contents: list[tuple[str, str]]) -> None:
    found = parse(Record(content, "here"))
    messages = [Message(role, text) for role, text in roles_and_contents]
    assert found == Conversation(messages, "here")


def test_texts() -> None:
    assert parse(Record({"text": "T"}, "here")) == Text("T", "here")
    assert parse(Record("T", "here")) == Text("T", "here")


@pytest.mark.parametrize(
    ("content", "data_format", "said"),
    [
        ([1], "auto", "a record must be an object, like"),
        ("text", "alpaca", "a record must be an object, like"),
        ({"question": "Q"}, "auto", r"it has 'question', and none of 'conversations'"),
        ({}, "auto", "it has no keys"),
        ({"instruction": "Q"}, "auto", r"'output' is missing \(it has 'instruction'\)"),
        ({"instruction": "Q", "output": 4}, "auto", '"output" is int, not a string'),
        ({"instruction": " ", "output": "A"}, "auto", '"instruction" is empty; fill it in'),
        ({"text": "Q"}, "alpaca", "'instruction' is missing"),
        ({"conversations": []}, "auto", "'conversations' must be a list of messages"),
        ({"conversations": [SAID]}, "auto", "no message is from 'gpt' or 'assistant'"),
        ({"conversations": [ANSWERED, SAID]}, "auto", "the first message is an answer to nothing"),
        ({"conversations": [SAID, {"from": "gpt"}]}, "auto", "message 2 must have 'from' and"),
        (
            {"conversations": [SAID, {"from": "bot", "value": "A"}]},
            "auto",
            "message 2 has from 'bot', which must be one of human",
        ),
        ({"messages": [{"role": "tool", "content": "A"}]}, "auto", "message 1 has role 'tool'"),
    ],
)
def test_what_is_no_record(content: Any, data_format: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^data.jsonl, line 7: .*{said}"):
        parse(Record(content, "data.jsonl, line 7"), data_format)
