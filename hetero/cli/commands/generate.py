"""`hetero generate`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.cli.commands.outcome import EXIT_OK
from hetero.cli.parser import examples

if TYPE_CHECKING:
    from hetero.cli.commands import Commands

DEFAULT_PROMPT = "def "


def add_command(commands: Commands) -> None:
    """Adds `generate`."""
    command = commands.add_parser(
        "generate",
        help="print text that a trained model makes",
        description="Prints a prompt, and what a model goes on with: the one that the newest run"
        " of hetero train left, or that of a folder. The model is held in memory whole. A folder"
        " without a tokenizer has bytes as tokens, as hetero train does.",
        epilog=examples(
            ("hetero generate", "with the model of the newest run"),
            ("hetero generate runs/first --prompt 'class ' --tokens 400", "with that of a run"),
            ("hetero generate my-model --temperature 0", "always the most probable token"),
        ),
    )
    command.add_argument(
        "path",
        nargs="?",
        metavar="FOLDER",
        help="a run folder of hetero train, or a folder of a Hugging Face causal language model"
        " (default: the newest run in runs)",
    )
    command.add_argument(
        "--prompt", default=DEFAULT_PROMPT, help="text to go on from (default: %(default)r)"
    )
    command.add_argument(
        "--tokens", type=int, default=200, help="so many are made (default: %(default)s)"
    )
    command.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="higher is more varied; 0: always the most probable token (default: %(default)s)",
    )
    command.add_argument(
        "--top-k",
        type=int,
        default=40,
        help="draw from so many of the most probable tokens; 0: from all (default: %(default)s)",
    )
    command.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the text as it comes."""
    # Late, because transformers takes seconds and belongs to the extra `train`.
    from hetero.cli.trained.model_folder import model_folder
    from hetero.cli.trained.sampling import SamplingOptions, end_tokens, load_model, sample

    options = SamplingOptions(
        arguments.tokens, arguments.temperature, arguments.top_k, arguments.seed
    )
    path = None if arguments.path is None else Path(arguments.path)
    model, vocabulary = load_model(model_folder(path))
    made: list[int] = []
    shown = ""
    sys.stdout.write(arguments.prompt)
    prompt = vocabulary.encode(arguments.prompt)
    for token in sample(model, prompt, options, end_tokens(model)):
        made.append(token)
        # The last characters may not be whole yet: a character has several bytes, or tokens.
        text = vocabulary.decode(made).rstrip("\N{REPLACEMENT CHARACTER}")
        if text.startswith(shown):
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write("\n")
    return EXIT_OK
