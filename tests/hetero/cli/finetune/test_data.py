"""hetero/cli/finetune/data: files, formats, and what is said of damaged records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ecosystem.tiny_tokenizer import CHAT_TEMPLATE, trained_tokenizer
from tests.support.late import late

datasets, data = late("datasets"), late("hetero.cli.finetune.data")

SAID = {"from": "human", "value": "Q"}
ANSWERED = {"from": "gpt", "value": "A"}
ANSWER = {"role": "assistant", "content": "A"}


def texts_of(path: Path, data_format: str = "auto", seq_len: int = 500) -> list[str]:
    tokenizer = trained_tokenizer(CHAT_TEMPLATE)
    found = data.read_data(str(path), tokenizer, seq_len, data_format)
    return [str(tokenizer.decode(tokens)) for tokens in found["input_ids"]]


def one(folder: Path, content: Any) -> Path:
    """A file with a record."""
    (folder / "d.jsonl").write_text(json.dumps(content))
    return folder / "d.jsonl"


@pytest.mark.parametrize(
    ("content", "roles_and_contents"),
    [
        ({"instruction": "Q", "output": "A"}, ["user\nQ", "assistant\nA"]),
        (
            {"system": "S", "instruction": "Q", "input": "I", "output": "A"},
            ["system\nS", "user\nQ\n\nI", "assistant\nA"],
        ),
        ({"conversations": [SAID, ANSWERED], "text": None}, ["user\nQ", "assistant\nA"]),
        (
            {"system": "S", "conversations": [SAID, ANSWERED, SAID, ANSWERED]},
            ["system\nS", *["user\nQ", "assistant\nA"] * 2],
        ),
        ({"messages": [{"role": "user", "content": "Q"}, ANSWER]}, ["user\nQ", "assistant\nA"]),
    ],
)
def test_conversations(content: Any, roles_and_contents: list[str], tmp_path: Path) -> None:
    wanted = "".join(f"<s>{each}</s>\n" for each in roles_and_contents)
    assert texts_of(one(tmp_path, content)) == [wanted]


def test_all_of_texts_is_learned(tmp_path: Path) -> None:
    """(Of conversations the answers alone: test_conversations.py.)"""
    tokenizer = trained_tokenizer(CHAT_TEMPLATE)
    (row,) = data.read_data(str(one(tmp_path, "The fox.")), tokenizer, 500, "auto")
    assert row["labels"] == row["input_ids"]
    assert tokenizer.decode(row["labels"]) == "The fox.</s>"


def test_a_long_text_has_several_rows(tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 40
    (tmp_path / "long.txt").write_text(text)
    found = texts_of(tmp_path / "long.txt", seq_len=16)
    assert len(found) > 10
    assert "".join(found) == f"{text}</s>"


def test_files_of_a_folder_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "1\u20281"}\n\n{"text": "2"}\n')
    (tmp_path / "a.json").write_text('\ufeff[{"text": "0"}]', encoding="utf-8")
    (tmp_path / "c.txt").write_text("three\nlines\n")
    (tmp_path / "notes.md").write_text("no data")
    rows: list[dict[str, str | None]] = [
        {"text": "3", "instruction": None, "output": None},
        {"text": None, "instruction": "Q", "output": "A"},
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "d.parquet"))
    found = [each.removesuffix("</s>") for each in texts_of(tmp_path)]
    asked = "<s>user\nQ</s>\n<s>assistant\nA</s>\n"
    assert found == ["0", "1\u20281", "2", "three\nlines\n", "3", asked]


@pytest.mark.parametrize(
    ("content", "data_format", "said"),
    [
        ([1], "auto", "a record must be an object, like"),
        ("text", "alpaca", "a record must be an object, like"),
        ({"question": "Q"}, "auto", r"it has \['question'\], and none of 'conversations'"),
        ({}, "auto", r"it has \[\], and none"),
        ({"instruction": "Q"}, "auto", r"'output' is missing \(it has \['instruction'\]\)"),
        ({"instruction": "Q", "output": 4}, "auto", "'output' is int, not a string"),
        ({"instruction": " ", "output": "A"}, "auto", "'instruction' is empty; fill it in"),
        ({"text": "Q"}, "alpaca", "'instruction' is missing"),
        ({"conversations": []}, "auto", "'conversations' must be a list of messages"),
        ({"conversations": [SAID]}, "auto", "its first message must be a question, and a later"),
        ({"conversations": [ANSWERED, SAID]}, "auto", "its first message must be a question"),
        ({"conversations": [SAID, {"from": "gpt"}]}, "auto", "message 2: 'value' is missing"),
        (
            {"conversations": [SAID, {"from": "bot", "value": "A"}]},
            "auto",
            "message 2 has from 'bot', which must be one of human",
        ),
        ({"conversations": [SAID, 3]}, "auto", "message 2 has from None, which must be one of"),
        ({"messages": [{"role": "tool", "content": "A"}]}, "auto", "message 1 has role 'tool'"),
        ({"messages": [{"role": ["a"], "content": "A"}]}, "auto", r"message 1 has role \['a'\]"),
    ],
)
def test_what_is_no_record(content: Any, data_format: str, said: str, tmp_path: Path) -> None:
    path = one(tmp_path, content)
    with pytest.raises(ValueError, match=rf"^{path}:1: {said}"):
        texts_of(path, data_format)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("d.jsonl", b'{"text": "1"}\n{"a": \n', "d.jsonl:2: column 7: no JSON"),
        ("d.json", b'[{"a": 1},\n {"a" 2}]', "d.json:2: column 7: no JSON"),
        ("d.json", b'[{"text": "1"},\n {"a": 2}]', "d.json: record 2: it has \\['a'\\]"),
        ("d.json", b'{"a": 1}', r"d.json:1: a .json file must be a list.*put it into \[ \]"),
        ("d.txt", b"one\ntwo \xff", "d.txt:2: byte 0xff is no UTF-8; save"),
        ("d.txt", b"  \n", "has no records"),
        ("d.jsonl", b"\n", "has no records"),
        ("d.csv", b"a,b", r"rename it.*\.jsonl"),
    ],
)
def test_damaged_files(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        texts_of(tmp_path / name)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        texts_of(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no file that ends in \.json"):
        texts_of(tmp_path)
