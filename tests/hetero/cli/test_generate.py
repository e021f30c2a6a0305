"""`hetero generate`: text from what `hetero train` leaves, and from any folder of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hetero.cli.main import main
from tests.support.cli_runs import Prints, Refuses, draw_nothing


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run that has learned a sentence."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        patch.chdir(folder)
        make_run()
    return folder


@pytest.fixture
def run(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder; the folder that it is in is the working folder."""
    draw_nothing(monkeypatch)
    monkeypatch.chdir(trained)
    return trained / "runs" / "one"


def make_run() -> None:
    model = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 256}
    Path("model.json").write_text(json.dumps({**model, "n_positions": 32}))
    Path("text").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    trained = ["train", "--model", "model.json", "--data", "text", "--max-steps", "60"]
    trained += ["--seq-len", "32", "--batch-size", "8", "--lr", "1e-2", "--warmup", "2"]
    assert main([*trained, "--run-dir", "runs/one"]) == 0


def test_what_a_run_has_learned(run: Path, prints: Prints) -> None:
    """From the newest run, a run folder and its model folder, as far as it has positions."""
    words = ["--prompt", "the quick", "--tokens", "60", "--temperature", "0"]
    folders = ("", "runs/one", "runs/one/model")
    printed = [prints("generate", folder, words) for folder in folders]
    assert printed[0].startswith("the quick brown fox jumps over")
    assert len(printed[0]) == 32 + 1 + 1  # of all positions a token follows
    assert printed[0] == printed[1] == printed[2]


def test_draws_are_those_of_the_seed(run: Path, prints: Prints) -> None:
    drawn = "generate --temperature 2 --tokens 12 --seed"
    assert prints(drawn, "1") == prints(drawn, "1") != prints(drawn, "2")
    assert prints(drawn, "0 --top-k 1") == prints(drawn, "5 --top-k 1")


def test_a_run_that_keeps_no_model(run: Path, refuses: Refuses) -> None:
    short = ["--seq-len", "8", "--batch-size", "1", "--max-steps", "1", "--no-save-model"]
    assert main(["train", "--model", "model.json", "--data", "text", *short]) == 0
    newest = max(path for path in Path("runs").iterdir() if path.name != "one")
    assert not (newest / "model").exists()
    refuses("neither a model folder", "generate", str(newest))


# Models of random weights, whose bytes are no text: printed ones are compared.


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GPT2LMHeadModel:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=256)
    config.eos_token_id = None
    return GPT2LMHeadModel(config).eval()


def generated(model: GPT2LMHeadModel, prints: Prints) -> tuple[list[int], str]:
    """Tokens that transformers makes, and what is printed of the model's folder."""
    right = model.generate(torch.tensor([[97]]), max_new_tokens=20, do_sample=False)
    model.save_pretrained("model")
    return right[0].tolist(), prints("generate model --prompt a --tokens 20 --temperature 0")


def test_tokens_are_those_of_transformers(model: GPT2LMHeadModel, prints: Prints) -> None:
    right, printed = generated(model, prints)
    assert printed == f"{bytes(right).decode(errors='replace')}\n"


def test_text_ends_where_the_model_says(model: GPT2LMHeadModel, prints: Prints) -> None:
    # So that each token is shown as soon as it is there.
    with torch.no_grad():
        model.lm_head.weight[128:] = 0.0
    made, _ = generated(model, prints)
    assert max(made) < 128
    for ends in (made[5], [made[5], 300]):
        model.generation_config.eos_token_id = ends
        expected = bytes([97, *made[1 : made.index(made[5], 1)]]).decode()
        assert generated(model, prints)[1] == f"{expected}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--temperature", "-1"], "--temperature must be 0 or more"),
        (["--temperature", "nan"], "--temperature must be 0 or more"),
        (["--top-k", "-1"], "--top-k must be 0 or more"),
        (["nowhere"], "nowhere is neither a model folder"),
        (
            ["adapter"],
            "adapter is an adapter of the base_model_name_or_path in adapter/adapter_conf",
        ),
        (["cut-off"], "error: cut-off: Error while deserializing header"),
        ([], "no run in the folder runs has left a model"),
    ],
)
def test_what_cannot_work_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refuses: Refuses,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "gone"}')
    (adapter / "adapter_model.safetensors").touch()
    (tmp_path / "cut-off").mkdir()
    (tmp_path / "cut-off" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    (tmp_path / "cut-off" / "model.safetensors").write_bytes(b"short")
    refuses(words, "generate", arguments)


def test_a_prompt_without_or_with_too_many_tokens_is_refused(run: Path, refuses: Refuses) -> None:
    refuses("has no chat template", "generate --chat")
    for prompt, words in (("", "at least one token"), ("x" * 33, "and the model 32 positions")):
        refuses(words, "generate --prompt", [prompt])
