"""`hetero generate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hetero.cli.outcome import EXIT_OK


def run(arguments: argparse.Namespace) -> int:
    """Prints the text as it comes, as far as the model has positions for it."""
    if arguments.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {arguments.tokens}")
    if not 0 <= arguments.temperature < float("inf"):
        raise ValueError(f"--temperature must be 0 or more, got {arguments.temperature}")
    if arguments.top_k < 0:
        raise ValueError(f"--top-k must be 0 or more, got {arguments.top_k}")
    if not 0 <= arguments.seed < 2**63:
        raise ValueError(f"--seed must be in [0, 2**63), got {arguments.seed}")
    folder = _model_folder(None if arguments.path is None else Path(arguments.path))
    # Late, because transformers takes seconds and belongs to the extra `train`.
    import torch
    from transformers import TextStreamer

    model, tokenizer = _load(folder)
    if not arguments.chat:
        tokens = tokenizer.encode(arguments.prompt)
    else:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"--chat: the tokenizer in {folder} has no chat template; leave it out"
            )
        message = [{"role": "user", "content": arguments.prompt}]
        tokens = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=False
        )
    if not tokens:
        raise ValueError("--prompt needs at least one token, for the model to go on from")
    positions = getattr(model.config, "max_position_embeddings", None)
    room = arguments.tokens
    if positions is not None:
        room = min(room, positions + 1 - len(tokens))
    if room < 1:
        raise ValueError(
            f"--prompt has {len(tokens)} tokens, and the model {positions} positions; shorten it"
        )
    print(arguments.prompt, end="\n" if arguments.chat else "", flush=True)
    torch.manual_seed(arguments.seed)
    drawn: dict[str, Any] = {"do_sample": False}
    if arguments.temperature > 0:
        drawn = {"do_sample": True, "temperature": arguments.temperature, "top_k": arguments.top_k}
    model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        max_new_tokens=room,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        pad_token_id=0,  # of one sequence there is nothing to pad
        **drawn,
    )
    return EXIT_OK


class _Bytes:
    """A tokenizer whose tokens are the values of bytes of UTF-8, as `hetero train` has them."""

    def __init__(self, ends: int | list[int] | None) -> None:
        """`ends`: tokens that are no text."""
        self._ends = ends if isinstance(ends, list) else [ends]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: int | list[int], **_: object) -> str:
        given = [tokens] if isinstance(tokens, int) else tokens
        text = bytes(token for token in given if token < 256 and token not in self._ends)
        return text.decode(errors="replace")


def _load(folder: Path) -> tuple[Any, Any]:
    """The causal language model of a folder, ready to generate, and its tokenizer, or bytes if it
    has none. Raises ValueError if transformers cannot read the folder."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
        if any(folder.glob("tokenizer*")) or (folder / "vocab.json").is_file():
            return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        adapter = folder / "adapter_config.json"
        of = f" is an adapter of the base_model_name_or_path in {adapter}" * adapter.is_file()
        raise ValueError(f"{folder}{of}: {' '.join(str(error).split())}") from error
    return model.eval(), _Bytes(model.generation_config.eos_token_id)


def _model_folder(path: Path | None) -> Path:
    """The folder of the model that `path` means: itself, or that of the run which it is.

    None means the newest run in `runs` that left a model. Raises ValueError if there is none.
    """
    from hetero.job.run_folder import MODEL_NAME

    if path is None:
        runs = [run / MODEL_NAME for run in Path("runs").glob("*")]
        found = [folder for folder in runs if _is_model(folder)]
        if not found:
            raise ValueError(
                "no run in the folder runs has left a model; name a folder (the --output of hetero "
                "finetune, say), or train one: hetero train"
            )
        return max(found, key=lambda folder: (folder / "config.json").stat().st_mtime)
    for folder in (path, path / MODEL_NAME):
        if _is_model(folder):
            return folder
    raise ValueError(
        f"{path} is neither a model folder (config.json and safetensors files) nor a run folder "
        f"that has one; hetero finetune leaves its result in --output, and hetero convert makes a "
        f"model folder of a checkpoint"
    )


def _is_model(folder: Path) -> bool:
    """Whether there are weights, or an adapter that names the folder of the weights."""
    names = ("config.json", "adapter_config.json")
    return any((folder / name).is_file() for name in names) and any(folder.glob("*.safetensors"))
