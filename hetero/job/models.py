"""Models: by name or from a configuration file, built by transformers without any download."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import hetero
from hetero.job.data import Corpus, load_corpus
from hetero.job.options import TrainOptions, config_path
from hetero.job.ranks import Ranks
from hetero.job.run_folder import MODEL_NAME, RunFolder
from hetero.option_checks import options_from_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BYTE_VALUES = 256

GPT2_VOCAB_SIZE = 50257

Shape = tuple[str, dict[str, Any]]  # the model_type, and what its configuration takes


def _gpt2(layers: int, width: int, heads: int) -> Shape:
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": GPT2_VOCAB_SIZE}
    # One pass over little of the data cannot overfit, and losses stay comparable.
    dropouts = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    return "gpt2", {**sizes, **dropouts, "bos_token_id": 0, "eos_token_id": 0}


def _opt(layers: int, width: int, heads: int) -> Shape:
    return "opt", {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "ffn_dim": 4 * width,
        "num_attention_heads": heads,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
    }


def _llama(
    layers: int, width: int, inner: int, heads: int, groups: int, vocab_size: int = 32000
) -> Shape:
    return "llama", {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": 4096,
        "vocab_size": vocab_size,
    }


# As published; but one that is quick enough to learn something in minutes on a CPU while its state
# is still worth offloading, and the 1.3B shape of GPT-3's table, which offloading systems are
# measured with.
SHAPES: dict[str, Shape] = {
    "gpt2-100m": _gpt2(8, 1024, 16),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt2-1.3b": _gpt2(24, 2048, 32),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8, vocab_size=128256),
    "llama-7b": _llama(32, 4096, 11008, 32, 32),
    "llama-13b": _llama(40, 5120, 13824, 40, 40),
    "llama-70b": _llama(80, 8192, 28672, 64, 8),
}
MODEL_NAMES = tuple(SHAPES)


def wanted_vocab_size(model: str, given: int | None) -> int | None:
    """What was given, else as published for a model by name; the configuration of another says.

    Raises ValueError for an unknown name.
    """
    if config_path(model) is not None or given is not None:
        return given
    vocab_size: int = _shape(model)[1]["vocab_size"]
    return vocab_size


def model_config(options: TrainOptions) -> PretrainedConfig:
    """The configuration of the model that the options name.

    Raises ValueError for an unknown name, an unreadable file or a vocabulary smaller than a byte.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    # Its warnings are about generation and special tokens, which bytes do not have.
    logging.set_verbosity_error()
    if options.config_path is not None:
        config = _config_from_file(options.config_path)
    else:
        model_type, shape = _shape(options.model)
        vocab_size = options.vocab_size or BYTE_VALUES
        if vocab_size < BYTE_VALUES:
            raise ValueError(f"--vocab-size must be at least {BYTE_VALUES}, got {vocab_size}")
        config = AutoConfig.for_model(model_type, **shape | {"vocab_size": vocab_size})
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < options.seq_len:
        config.max_position_embeddings = options.seq_len
    # A cache of keys and values is for generation; in training it only holds memory.
    config.use_cache = False
    return config


def model_label(options: TrainOptions) -> str:
    """How the model is called in tables and figures."""
    path = options.config_path
    if path is None:
        return options.model
    return path.resolve().parent.name if path.name == "config.json" else path.stem


class BytesTask:
    """What `hetero train` does: a model of random weights learns the bytes of a text."""

    def __init__(self, options: TrainOptions, ranks: Ranks) -> None:
        """Raises ValueError for data or a model that cannot be had."""
        self.data: Corpus = load_corpus(options.data, options.seq_len, options.seed, ranks)
        self._config = model_config(options)
        self.label = model_label(options)
        self.vocab_size: int = self._config.vocab_size
        self._saves = options.save_model

    def shape(self) -> torch.nn.Module:
        """The model on the meta device."""
        return build_shape(self._config)

    def build(self) -> torch.nn.Module:
        """The model."""
        return build_model(self._config)

    def finish(self, model: Any, run_folder: RunFolder) -> str | None:
        """Writes the weights of a run that made all its steps, while the model is still managed.

        All ranks call it. Returns their folder, in the run folder; None: --no-save-model was given.
        Raises ValueError if the folder is something else, StoreError, OSError.
        """
        if not self._saves:
            return None
        # Training does without a cache of keys and values; generation should not.
        for config in (model.config, getattr(model, "generation_config", None)):
            if config is not None:
                config.use_cache = True
        path = run_folder.path / MODEL_NAME
        hetero.save_pretrained(model, path)
        return str(path)


def build_model(config: PretrainedConfig) -> torch.nn.Module:
    """A freshly initialised model in training mode, its weights as its own code makes them."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


def build_shape(config: PretrainedConfig) -> torch.nn.Module:
    """The same on the meta device: its parameters have no memory."""
    with torch.device("meta"):
        return build_model(config)


def count_parameters(config: PretrainedConfig) -> int:
    """Number of parameters, tied ones once; allocates none of them."""
    return sum(parameter.numel() for parameter in build_shape(config).parameters())


def _shape(name: str) -> Shape:
    if name not in SHAPES:
        near = difflib.get_close_matches(name, MODEL_NAMES, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(MODEL_NAMES)}"
        raise ValueError(f"unknown model {name!r}; {hint} Or give a config.json, or its folder")
    return SHAPES[name]


def _config_from_file(path: Path) -> PretrainedConfig:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content = options_from_file(path, "the model's configuration")
    model_type = content.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ValueError(f'{path} must be an object with a "model_type", like "llama"')
    # Weights start in fp32, where the master is; the compute dtype is the engine's business.
    for key in ("dtype", "torch_dtype"):
        content.pop(key, None)
    known = list(CONFIG_MAPPING.keys())
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"{path}: unknown model_type {model_type!r}{hint}")
    try:
        config = AutoConfig.for_model(model_type, **content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    vocab_size = getattr(config, "vocab_size", None)
    if vocab_size is None or vocab_size < BYTE_VALUES:
        raise ValueError(f"{path}: vocab_size must be at least {BYTE_VALUES}, got {vocab_size}")
    return config
