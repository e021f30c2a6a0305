"""What is fine-tuned on what: the model's folder, its tokenizer, an adapter, and the examples."""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

import hetero
from hetero.cli.finetune.chat import Encoder
from hetero.cli.finetune.examples import Collation, Examples, Row, packed, stream
from hetero.cli.finetune.export import export
from hetero.cli.finetune.formats import Conversation, Text, parse
from hetero.cli.finetune.options import FinetuneOptions
from hetero.cli.finetune.records import read_records
from hetero.cli.job.ranks import Ranks
from hetero.cli.job.run_folder import RunFolder

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class FinetuneTask:
    """A model of Hugging Face's with the data that it learns; a Task of a job.

    Attributes:
        data: the examples, in sequences.
        label: the folder's name.
        vocab_size: of the model.
        tokenizer: of the folder; its chat template is the one in use.
    """

    def __init__(self, options: FinetuneOptions, ranks: Ranks) -> None:
        """Reads and checks all but the weights.

        Raises:
            ValueError: folder, tokenizer, template or a record is unfit; it says which and why.
        """
        self._options = options
        self._ranks = ranks
        self._folder = Path(options.model)
        self._config = _config(self._folder)
        self.tokenizer = _tokenizer(self._folder, options.chat_template)
        self.label = self._folder.resolve().name
        # (A model of images and text has all that is asked here in a part of its configuration.)
        self._text_config = self._config.get_text_config()
        self.vocab_size: int = self._text_config.vocab_size
        self._check_sizes()
        self.data = self._examples()

    def with_steps(self) -> FinetuneOptions:
        """The options, with the steps that the epochs are."""
        options, data = self._options, self.data
        if options.max_steps is not None:
            return replace(options, steps=options.max_steps)
        return replace(options, steps=max(1, ceil(options.epochs * len(data.rows) / data.per_step)))

    def finish(self, model: Any, run_folder: RunFolder) -> str:
        """As of Task: the result goes to --output."""
        options = self._options
        self.restore_cache(model)
        export(model, options, self.tokenizer, self._ranks.leads)
        if self._ranks.leads:
            print(f"hetero finetune: {_what(options)} is in {options.output}", file=sys.stderr)
        return options.output

    def restore_cache(self, model: Any) -> None:
        """Sets what the folder says of a cache, for the export of a model of shape() or build()."""
        own = vars(self._text_config)
        if "use_cache" in own:
            model.config.get_text_config().use_cache = own["use_cache"]
        else:
            vars(model.config.get_text_config()).pop("use_cache", None)

    def shape(self) -> torch.nn.Module:
        """As of Task."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(self._config))
        return self._finished(model)

    def build(self) -> torch.nn.Module:
        """As of Task. Raises ValueError if the folder has no weights that fit."""
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(
                self._folder, config=copy.deepcopy(self._config), local_files_only=True
            )
        except (OSError, RuntimeError) as error:
            raise ValueError(f"--model {self._folder}: no weights to load: {error}") from error
        return self._finished(model)

    def _finished(self, model: Any) -> torch.nn.Module:
        options = self._options
        # A cache of keys and values is for generation; in training it only holds memory. (Not
        # earlier, or the configuration of generation would be made from it.)
        model.config.get_text_config().use_cache = False
        if options.lora_rank:
            from peft import LoraConfig, get_peft_model

            adapter = LoraConfig(
                r=options.lora_rank,
                lora_alpha=options.lora_alpha or 2 * options.lora_rank,
                lora_dropout=options.lora_dropout,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
                base_model_name_or_path=str(self._folder),
            )
            model = get_peft_model(model, adapter)
        trained: torch.nn.Module = model.train()
        return trained

    def _check_sizes(self) -> None:
        options, folder = self._options, self._folder
        if len(self.tokenizer) > self.vocab_size:
            raise ValueError(
                f"--model {folder}: the tokenizer has {len(self.tokenizer)} tokens, and the model "
                f"{self.vocab_size}; enlarge it with model.resize_token_embeddings(), and save it"
            )
        positions = getattr(self._text_config, "max_position_embeddings", None)
        if positions is not None and positions < options.seq_len:
            raise ValueError(
                f"--seq-len {options.seq_len} is more than the {positions} positions of the model "
                f"in {folder}; give --seq-len {positions} or less"
            )

    def _examples(self) -> Examples:
        options, ranks = self._options, self._ranks
        assert options.data is not None
        encoder = Encoder(self.tokenizer, options.seq_len)
        parsed = [parse(record, options.format) for record in read_records(options.data)]
        texts = [encoder.text(each) for each in parsed if isinstance(each, Text)]
        examples = [encoder.conversation(each) for each in parsed if isinstance(each, Conversation)]
        rows: list[Row] = [[example] for example in examples]
        if options.packing:
            rows = list(packed(examples, options.seq_len))
        if texts:
            rows += stream(texts, options.seq_len, f"--data {options.data}")
        collation = Collation(self._pad_token(), self._mask_dtype())
        count = len(examples) + len(texts)
        description = f"{options.data} ({count} records in {len(rows)} sequences)"
        per_step = options.batch_size * options.accumulate * ranks.count
        return Examples(rows, collation, description, options.seed, per_step, ranks)

    def _pad_token(self) -> int:
        found = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id if found is None else found)

    def _mask_dtype(self) -> torch.dtype | None:
        """Of the mask of packed sequences. Raises ValueError if the model takes none."""
        options = self._options
        if not options.packing:
            return None
        forward = type(self._on_meta()).forward
        if "position_ids" not in inspect.signature(forward).parameters:
            raise ValueError(
                f"--packing needs a model that is told positions, and the {self._config.model_type}"
                f" in {self._folder} is not; leave --packing out"
            )
        self._check_attention()
        config = hetero.Config.make(
            dtype=options.dtype, backend=options.backend, link_gbps=options.link_gbps
        )
        return config.dtypes.torch_compute

    def _check_attention(self) -> None:
        """Raises ValueError if a layer sees less, or other things, than a mask for all layers says.

        transformers takes such a mask as it is, without a window of its own, and a layer that is no
        attention does not see it.
        """
        config, options = self._text_config, self._options
        reason, window = "", getattr(config, "sliding_window", None)
        if window and window < options.seq_len and getattr(config, "use_sliding_window", True):
            reason = f"sees {window} tokens at a time, fewer than --seq-len {options.seq_len}"
        for name in ("layer_types", "layers_block_type"):
            others = set(getattr(config, name, None) or ()) - {"full_attention", "attention"}
            if others:
                reason = f"has layers of other kinds ({', '.join(sorted(others))})"
        if reason:
            raise ValueError(
                f"--packing needs a model whose layers all see a whole sequence, and the "
                f"{self._config.model_type} in {self._folder} {reason}; leave --packing out"
            )

    def _on_meta(self) -> Any:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(self._config))


def _what(options: FinetuneOptions) -> str:
    if not options.lora_rank:
        return "the model"
    return "the model with its adapter merged" if options.merge else "the adapter"


def _config(folder: Path) -> Any:
    """Raises ValueError if the folder has none."""
    from transformers import AutoConfig
    from transformers.utils import logging

    # Its warnings are about downloads and generation, and its bars are of a file each.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"--model {folder} has no config.json; give the folder of a model as save_pretrained() "
            f"writes it (a model of the hub is downloaded by `hf download NAME --local-dir DIR`)"
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model {folder}: config.json cannot be used: {error}") from error


def _tokenizer(folder: Path, chat_template: str | None) -> Any:
    """Raises ValueError if there is none, or the template's file cannot be read."""
    from transformers import AutoTokenizer

    advice = "put tokenizer.json and tokenizer_config.json into the folder"
    # Without any of these some versions make an empty tokenizer of the model's kind.
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"--model {folder} has no tokenizer; {advice}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--model {folder}: the tokenizer cannot be loaded ({reason}); {advice}"
        ) from error
    if chat_template == "default":
        tokenizer.chat_template = None
    elif chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"cannot read --chat-template {chat_template}: {error.strerror}"
            ) from error
    return tokenizer
