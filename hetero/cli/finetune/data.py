"""Records of data files as tokens with labels; errors say file and line.

They are read and checked here because TRL's errors name no record. Conversations have labels on
their answers: TRL finds several answers of a conversation only in templates that mark them, and
leaves out without a word a conversation whose answers are cut off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as parquet

_COLUMNS = ("input_ids", "labels")
SUFFIXES = (".json", ".jsonl", ".parquet", ".txt")
_LIKE = {  # records of each format, by the key that tells it
    "conversations": '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}',
    "messages": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}',
    "instruction": '{"instruction": "...", "input": "...", "output": "..."}',
    "text": '{"text": "..."}',
}
_KEYS = {"sharegpt": "conversations", "alpaca": "instruction"}  # the others are their own
_ROLES = {role: role for role in ("system", "user", "assistant")}
_TURNS = {  # the keys of a message, and the roles
    "conversations": ("from", "value", {"human": "user", "gpt": "assistant", **_ROLES}),
    "messages": ("role", "content", _ROLES),
}
NOT_LEARNED = -100  # the label that losses leave out
_FIX = "give another template (--chat-template FILE, or 'default'), or change the record"

# For a tokenizer without one: plain text, so that no token has to be added to the vocabulary.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'].capitalize() + ':\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}"
)


def read_data(path: str, tokenizer: Any, seq_len: int, data_format: str) -> datasets.Dataset:
    """`input_ids` and `labels` of all records; a long text has several rows of `seq_len` tokens.

    Raises ValueError for the first file or record that is unfit.
    """
    rows: list[tuple[list[int], list[int]]] = []
    for content, place in _records(Path(path)):
        try:
            found = _parsed(content, data_format)
            if isinstance(found, str):
                rows += [(piece, piece) for piece in _pieces(tokenizer, found, seq_len)]
            else:
                rows.append(answer_labels(tokenizer, found, seq_len))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    if not rows:
        raise ValueError(f"{path} has no records; give a file with some")
    return datasets.Dataset.from_list([dict(zip(_COLUMNS, row, strict=True)) for row in rows])


def _pieces(tokenizer: Any, text: str, seq_len: int) -> list[list[int]]:
    tokens = tokenizer(text, verbose=False)["input_ids"]
    if tokens[-1:] != [tokenizer.eos_token_id]:
        tokens.append(tokenizer.eos_token_id)
    pieces = [tokens[begin : begin + seq_len] for begin in range(0, len(tokens), seq_len)]
    return [piece for piece in pieces if len(piece) > 1]  # (one token predicts nothing)


def _records(root: Path) -> Iterator[tuple[Any, str]]:
    """Each record of a file, or of a folder's files in sorted order, and its place."""
    if not root.exists():
        raise ValueError(f"{root}: no such file or folder; correct the path of the data")
    files = sorted(root.iterdir()) if root.is_dir() else [root]
    files = [file for file in files if file.suffix in SUFFIXES]
    if not files:
        raise ValueError(
            f"{root}: no file that ends in {', '.join(SUFFIXES)}; rename it to what it is: "
            f".json, a list of records; .jsonl, one on each line; .txt, a text"
        )
    for file in files:
        if file.suffix == ".parquet":
            # (Not by datasets, which would copy it into its cache.)
            rows = parquet.read_table(file).to_pylist()
            yield from ((each, f"{file}: record {n}") for n, each in enumerate(rows, start=1))
            continue
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            byte = f"byte {error.object[error.start]:#04x}"
            raise ValueError(f"{file}:{line}: {byte} is no UTF-8; save it as UTF-8") from error
        if file.suffix == ".jsonl":
            # (Not splitlines(): U+2028 and others may stand inside a JSON string.)
            for n, each in enumerate(text.split("\n"), start=1):
                if each.strip():
                    yield _json(each, file, n), f"{file}:{n}"
        elif file.suffix == ".json":
            content = _json(text, file, 1)
            if not isinstance(content, list):
                what = "a .json file must be a list of records; put it into [ ], or name it .jsonl"
                raise ValueError(f"{file}:1: {what}")
            yield from ((each, f"{file}: record {n}") for n, each in enumerate(content, start=1))
        elif text.strip():
            yield text, str(file)


def _json(text: str, file: Path, line: int) -> Any:
    """`line`: where the text begins in the file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        what = f"column {error.colno}: no JSON: {error.msg}; correct it there"
        raise ValueError(f"{file}:{line + error.lineno - 1}: {what}") from error


def _parsed(content: Any, data_format: str) -> list[dict[str, str]] | str:
    """A record as a conversation with an answer, or as a text. Raises ValueError."""
    if isinstance(content, str) and data_format in ("auto", "text"):
        content = {"text": content}
    if not isinstance(content, Mapping):
        raise ValueError(f"a record must be an object, like {_LIKE['instruction']}")
    # (A table has a column for what another record has, with None.)
    key = next((key for key in _LIKE if content.get(key) is not None), None)
    if data_format != "auto":
        key = _KEYS.get(data_format, data_format)
    if key is None:
        raise ValueError(
            f"it has {[*content]}, and none of {', '.join(map(repr, _LIKE))}, by which a "
            f"record's format is known; write it like {_LIKE['instruction']}"
        )
    if key == "text":
        return _filled(content, key)
    said = [("system", _filled(content, "system"))] if content.get("system") else []
    if key == "instruction":
        given = f"\n\n{_filled(content, 'input')}" if content.get("input") else ""
        said.append(("user", _filled(content, key) + given))
        said.append(("assistant", _filled(content, "output")))
    else:
        said += _turns(content.get(key), key)
    return [{"role": role, "content": text} for role, text in said]


def _turns(turns: Any, key: str) -> list[tuple[str, str]]:
    role_key, text_key, roles = _TURNS[key]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{key!r} must be a list of messages, like {_LIKE[key]}")
    said = []
    for number, turn in enumerate(turns, start=1):
        role = turn.get(role_key) if isinstance(turn, Mapping) else None
        if role not in tuple(roles):
            known = f"one of {', '.join(roles)}; write it like {_LIKE[key]}"
            raise ValueError(f"message {number} has {role_key} {role!r}, which must be {known}")
        said.append((roles[role], _filled(turn, text_key, f"message {number}: ")))
    found = [role for role, _ in said]
    if found[0] == "assistant" or "assistant" not in found:
        raise ValueError(
            "its first message must be a question, and a later one an answer, which is what is "
            "learned; add what is missing, or remove the record"
        )
    return said


def _filled(content: Mapping[str, Any], key: str, where: str = "") -> str:
    value = content.get(key)
    if value is None:
        raise ValueError(f"{where}{key!r} is missing (it has {[*content]}); add it")
    if not isinstance(value, str):
        raise ValueError(
            f"{where}{key!r} is {type(value).__name__}, not a string; put it in quotes"
        )
    if not value.strip():
        raise ValueError(f"{where}{key!r} is empty; fill it in, or remove the record")
    return value


def answer_labels(
    tokenizer: Any, messages: Sequence[dict[str, str]], seq_len: int
) -> tuple[list[int], list[int]]:
    """The tokens of a conversation, as its chat template writes it, and their labels.

    Labels are NOT_LEARNED outside of the assistant's messages, with what ends these. SFTTrainer
    takes both in a dataset's columns `input_ids` and `labels`.

    Args:
        tokenizer: a fast one of transformers', with a chat template.
        messages: each with "role" and "content".
        seq_len: later tokens are left out.

    Raises:
        ValueError: the template cannot write the messages, or writes one of them differently when
            others follow; or nothing that is learned is left.
    """
    whole, answers = _written(tokenizer, messages), []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _written(tokenizer, messages[:number], prompts=True)
            after = _written(tokenizer, messages[: number + 1])
            if not (whole.startswith(before) and whole.startswith(after)):
                raise ValueError(
                    f"the chat template writes message {number + 1} differently when others "
                    f"follow, so that answers cannot be told from questions; {_FIX}"
                )
            answers.append((len(before), len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = encoded["input_ids"][:seq_len]
    labels = [
        token if any(begin < last and end > first for first, last in answers) else NOT_LEARNED
        for token, (begin, end) in zip(tokens, encoded["offset_mapping"], strict=False)
    ]
    # (The first token's label is not used: there is nothing that it could be predicted from.)
    if all(label == NOT_LEARNED for label in labels[1:]):
        raise ValueError(
            f"of {len(encoded['input_ids'])} tokens the first {seq_len} have no word of an answer; "
            f"give a larger --seq-len, or remove the record"
        )
    return tokens, labels


def _written(tokenizer: Any, messages: Sequence[dict[str, str]], prompts: bool = False) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompts
        )
    except Exception as error:  # a template is a program, and raises what it likes
        raise ValueError(f"the chat template refuses it: {error}; {_FIX}") from error
    return str(text)
