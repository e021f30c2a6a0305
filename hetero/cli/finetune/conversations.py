"""Conversations as tokens with labels on their answers, for trainers of Hugging Face's and TRL's.

TRL finds several answers of a conversation only in templates that mark them, and leaves out without
a word a conversation whose answers are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
