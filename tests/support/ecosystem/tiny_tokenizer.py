"""A real tokenizer, made by the test: byte-level BPE, trained on a few lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.ecosystem.tiny_models import llama_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT = ["The quick brown fox jumps over the lazy dog.", "What is two and two? It is four."] * 3
VOCAB_SIZE = 320
POSITIONS = 128

# As published models have them, with marks of their own for turns.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + '\\n' + message['content'] "
    "+ '</s>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)


def trained_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of VOCAB_SIZE tokens at most, which knows every byte."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    made.chat_template = chat_template
    return made


def model_folder(path: Path, chat_template: str | None = None) -> Path:
    """The folder of a tiny model with its tokenizer; returns it."""
    llama_folder(path, VOCAB_SIZE, POSITIONS, layers=1)
    trained_tokenizer(chat_template).save_pretrained(path)
    return path
