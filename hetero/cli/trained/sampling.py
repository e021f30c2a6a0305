"""Text from a trained model: what comes after a prompt, token by token."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hetero.cli.job.models import BYTE_VALUES


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen from the logits of the last position.

    Attributes:
        tokens: so many are made.
        temperature: the logits are divided by it; 0 takes the most probable token.
        top_k: only so many of the most probable ones are drawn from; 0: all of them.
        seed: of the draws.
    """

    tokens: int
    temperature: float
    top_k: int
    seed: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"--tokens must be at least 1, got {self.tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"--top-k must be 0 or more, got {self.top_k}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be in [0, 2**63), got {self.seed}")


class Vocabulary(Protocol):
    """Turns text into a model's tokens, and back."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


class ByteVocabulary:
    """A token is the value of a byte of UTF-8, as `hetero train` has it."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < BYTE_VALUES).decode(errors="replace")


class TokenizerVocabulary:
    """That of a tokenizer of transformers; its special tokens are not shown."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text)
        return found

    def decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def load_model(folder: Path) -> tuple[Any, Vocabulary]:
    """A model folder's causal language model, ready to generate, and its vocabulary.

    That is the folder's tokenizer, or bytes if it has none. Raises ValueError if transformers
    cannot read the folder.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
        has_tokenizer = any(folder.glob("tokenizer*")) or (folder / "vocab.json").is_file()
        vocabulary: Vocabulary = ByteVocabulary()
        if has_tokenizer:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            vocabulary = TokenizerVocabulary(tokenizer)
    except (OSError, KeyError) as error:
        raise ValueError(f"{folder}: {error}") from error
    return model.eval(), vocabulary


@torch.no_grad()
def sample(
    model: Any, prompt: list[int], options: SamplingOptions, ends: Collection[int] = ()
) -> Iterator[int]:
    """The tokens after `prompt`, one by one, until one of `ends` comes.

    A model sees at most as many tokens as it has positions: once these are full, it goes on with
    the last half of them. Raises ValueError if the prompt is empty.
    """
    if not prompt:
        raise ValueError("--prompt needs at least one token, for the model to go on from")
    generator = torch.Generator().manual_seed(options.seed)
    positions = getattr(model.config, "max_position_embeddings", None)
    # transformers 5.24 has another name for it than those before.
    names = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"
    tokens, cache, fed = list(prompt), None, 0
    for _ in range(options.tokens):
        if positions is not None and len(tokens) > positions:
            tokens, cache, fed = tokens[-max(1, positions // 2) :], None, 0
        new = torch.tensor([tokens[fed:]])
        found = model(input_ids=new, use_cache=True, **{cache_name: cache})
        cache, fed = found[cache_name], len(tokens)
        tokens.append(_choose(found.logits[0, -1].float(), options, generator))
        if tokens[-1] in ends:
            return
        yield tokens[-1]


def end_tokens(model: Any) -> set[int]:
    """The tokens by which the model says that its text ends."""
    given = getattr(model.generation_config, "eos_token_id", None)
    return set() if given is None else {given} if isinstance(given, int) else set(given)


def _choose(logits: torch.Tensor, options: SamplingOptions, generator: torch.Generator) -> int:
    """A token by its logits, float32[vocabulary]."""
    if options.temperature == 0:
        return int(logits.argmax())
    if 0 < options.top_k < len(logits):
        least = logits.topk(options.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -float("inf"))
    chances = torch.softmax(logits / options.temperature, 0)
    return int(torch.multinomial(chances, 1, generator=generator))
