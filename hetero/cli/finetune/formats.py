"""What records look like: alpaca, sharegpt, messages and text become conversations or texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.cli.finetune.records import Record

FORMATS = ("auto", "alpaca", "sharegpt", "messages", "text")

# How sharegpt's files call the roles of a conversation.
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    role: str  # one of ROLES
    content: str


@dataclass(frozen=True)
class Conversation:
    """Messages of which the assistant's are learned; there is one at least."""

    messages: Sequence[Message]
    place: str


@dataclass(frozen=True)
class Text:
    """A text of which every token is learned."""

    text: str
    place: str


def parse(record: Record, data_format: str = "auto") -> Conversation | Text:
    """What a record says, by one of FORMATS; "auto" goes by its keys.

    Raises:
        ValueError: it is not in the format; names the record, what it has, and what it needs.
    """
    content, place = record.content, record.place
    if isinstance(content, str) and data_format in ("auto", "text"):
        return Text(_filled(content, "the text", place), place)
    if not isinstance(content, Mapping):
        raise ValueError(f"{place}: a record must be an object, like {_EXAMPLES['alpaca']}")
    name = _found_format(content, place) if data_format == "auto" else data_format
    if name == "text":
        return Text(_filled(_value(content, "text", place, name), '"text"', place), place)
    if name == "alpaca":
        messages = _alpaca(content, place)
    elif name == "sharegpt":
        messages = _turns(content, "conversations", "from", "value", _SHAREGPT_ROLES, place, name)
    else:
        roles = {role: role for role in ROLES}
        messages = _turns(content, "messages", "role", "content", roles, place, name)
    return Conversation(messages, place)


_EXAMPLES = {
    "alpaca": '{"instruction": "...", "input": "...", "output": "..."}',
    "sharegpt": '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}',
    "messages": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}',
    "text": '{"text": "..."}',
}
_KEYS = {
    "conversations": "sharegpt",
    "messages": "messages",
    "instruction": "alpaca",
    "text": "text",
}


def _found_format(content: Mapping[str, Any], place: str) -> str:
    for key, name in _KEYS.items():
        if key in content:
            return name
    has = ", ".join(map(repr, content)) or "no keys"
    raise ValueError(
        f"{place}: it has {has}, and none of {', '.join(map(repr, _KEYS))}, by which a record's "
        f"format is known; write it like {_EXAMPLES['alpaca']} or {_EXAMPLES['sharegpt']}"
    )


def _value(content: Mapping[str, Any], key: str, place: str, name: str) -> Any:
    if key not in content:
        has = ", ".join(map(repr, content)) or "no keys"
        raise ValueError(
            f"{place}: {key!r} is missing (it has {has}); a record of the format {name} is like "
            f"{_EXAMPLES[name]}"
        )
    return content[key]


def _string(value: Any, what: str, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"{place}: {what} is {type(value).__name__}, not a string; put it in quotation marks"
        )
    return value


def _filled(value: Any, what: str, place: str) -> str:
    text = _string(value, what, place)
    if not text.strip():
        raise ValueError(f"{place}: {what} is empty; fill it in, or remove the record")
    return text


def _alpaca(content: Mapping[str, Any], place: str) -> list[Message]:
    instruction = _filled(_value(content, "instruction", place, "alpaca"), '"instruction"', place)
    answer = _filled(_value(content, "output", place, "alpaca"), '"output"', place)
    given = _string(content.get("input") or "", '"input"', place)
    system = _string(content.get("system") or "", '"system"', place)
    messages = [Message("system", system)] if system else []
    question = f"{instruction}\n\n{given}" if given.strip() else instruction
    return [*messages, Message("user", question), Message("assistant", answer)]


def _turns(
    content: Mapping[str, Any],
    key: str,
    role_key: str,
    content_key: str,
    roles: Mapping[str, str],
    place: str,
    name: str,
) -> list[Message]:
    turns = _value(content, key, place, name)
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{place}: {key!r} must be a list of messages, like {_EXAMPLES[name]}")
    messages = []
    system = content.get("system")
    if system:
        messages.append(Message("system", _string(system, '"system"', place)))
    for number, turn in enumerate(turns, start=1):
        what = f"message {number}"
        if not isinstance(turn, Mapping) or not {role_key, content_key} <= turn.keys():
            raise ValueError(
                f"{place}: {what} must have {role_key!r} and {content_key!r}, like "
                f"{_EXAMPLES[name]}"
            )
        said = turn[role_key]
        if not isinstance(said, str) or said not in roles:
            raise ValueError(
                f"{place}: {what} has {role_key} {said!r}, which must be one of {', '.join(roles)}"
            )
        text = _filled(turn[content_key], f"{content_key!r} of {what}", place)
        messages.append(Message(roles[said], text))
    if messages[0].role == "assistant":
        raise ValueError(
            f"{place}: the first message is an answer to nothing; put a question before it, or "
            f"remove it"
        )
    if all(message.role != "assistant" for message in messages):
        answers = " or ".join(repr(each) for each, role in roles.items() if role == "assistant")
        raise ValueError(
            f"{place}: no message is from {answers}, so there is nothing to learn; remove the "
            f"record, or give its answer"
        )
    return messages
