"""Conversations as a model's tokenizer writes them, with labels on the assistant's words alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero.cli.finetune.formats import Conversation, Message, Text

NOT_LEARNED = -100  # the label that cross_entropy leaves out

# For a tokenizer without one: plain text, so that no token has to be added to the vocabulary.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'].capitalize() + ':\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Example:
    """The tokens of a record, and a label for each: itself, or NOT_LEARNED.

    The first token has none: nothing is there that it could be predicted from.
    """

    tokens: Sequence[int]
    labels: Sequence[int]
    place: str

    @property
    def learned(self) -> int:
        """How many tokens are learned."""
        return sum(label != NOT_LEARNED for label in self.labels)


class Encoder:
    """Makes examples with a tokenizer of transformers'."""

    def __init__(self, tokenizer: Any, seq_len: int) -> None:
        """`seq_len`: more tokens no example has. Raises ValueError for an unfit tokenizer."""
        if not tokenizer.is_fast:
            raise ValueError(
                f"the tokenizer {type(tokenizer).__name__} does not say which characters a token "
                f"stands for, so that answers cannot be found in it; save a fast one "
                f"(tokenizer.json) in the model's folder"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no eos_token, by which an answer ends; name one in its "
                'tokenizer_config.json ("eos_token")'
            )
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        if tokenizer.chat_template is None:
            tokenizer.chat_template = DEFAULT_TEMPLATE

    def text(self, text: Text) -> list[int]:
        """All tokens of a text, and the one that ends it."""
        tokens = self._tokenizer(text.text, add_special_tokens=True, verbose=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return tokens if tokens and tokens[-1] == end else [*tokens, end]

    def conversation(self, conversation: Conversation) -> Example:
        """The tokens of a conversation, cut to the sequence length.

        Raises:
            ValueError: the template cannot write it, or nothing that is learned is left.
        """
        place, messages = conversation.place, conversation.messages
        whole = self._written(messages, place)
        answers = []
        for number, message in enumerate(messages):
            if message.role == "assistant":
                before = self._written(messages[:number], place, prompts=True)
                after = self._written(messages[: number + 1], place)
                if not (whole.startswith(before) and whole.startswith(after)):
                    raise ValueError(
                        f"{place}: the chat template of the tokenizer writes message "
                        f"{number + 1} differently when others follow, so that answers cannot be "
                        f"told from questions; give --chat-template FILE, or 'default'"
                    )
                answers.append((len(before), len(after)))
        encoded = self._tokenizer(
            whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        tokens = encoded["input_ids"][: self._seq_len]
        labels = [
            token if any(begin < last and end > first for first, last in answers) else NOT_LEARNED
            for token, (begin, end) in zip(tokens, encoded["offset_mapping"], strict=False)
        ]
        if labels:
            labels[0] = NOT_LEARNED
        example = Example(tokens, labels, place)
        if example.learned == 0:
            raise ValueError(
                f"{place}: of {len(encoded['input_ids'])} tokens the first {self._seq_len} have no "
                f"word of an answer; give a larger --seq-len, or remove the record"
            )
        return example

    def _written(self, messages: Sequence[Message], place: str, prompts: bool = False) -> str:
        given = [{"role": each.role, "content": each.content} for each in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                given, tokenize=False, add_generation_prompt=prompts
            )
        except Exception as error:  # a template is a program, and raises what it likes
            raise ValueError(
                f"{place}: the chat template of the tokenizer refuses it: {error}; change the "
                f"record, or give --chat-template FILE, or 'default'"
            ) from error
        return str(text)
