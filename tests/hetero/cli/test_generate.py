"""`hetero generate`: text from what `hetero train` leaves, and from any folder of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hetero.cli.main import main
from hetero.cli.trained.sampling import ByteVocabulary, SamplingOptions, end_tokens, sample

GREEDY = SamplingOptions(tokens=20, temperature=0.0, top_k=0, seed=0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with one run that has learned a sentence."""
    monkeypatch.chdir(tmp_path)
    model = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 256}
    Path("model.json").write_text(json.dumps({**model, "n_positions": 32}))
    Path("text").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    trained = ["train", "--config", "model.json", "--data", "text", "--steps", "60"]
    trained += ["--seq-len", "32", "--batch-size", "8", "--lr", "1e-2", "--warmup", "2"]
    assert main([*trained, "--run-dir", "runs/one"]) == 0
    return tmp_path / "runs" / "one"


def test_what_a_run_has_learned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the newest run, a run folder and its model folder, and beyond the model's positions."""
    printed = []
    for folder in ([], ["runs/one"], ["runs/one/model"]):
        capsys.readouterr()
        words = ["--prompt", "the quick", "--tokens", "60", "--temperature", "0"]
        assert main(["generate", *folder, *words]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0].startswith("the quick brown fox jumps over")
    assert len(printed[0]) == len("the quick") + 60 + 1
    assert printed[0] == printed[1] == printed[2]


def test_draws_are_those_of_the_seed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["generate", "--temperature", "2", "--tokens", "40", *arguments]) == 0
        return capsys.readouterr().out

    assert printed("--seed", "1") == printed("--seed", "1") != printed("--seed", "2")
    assert printed("--top-k", "1") == printed("--top-k", "1", "--seed", "5")


def test_a_run_that_keeps_no_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--seq-len", "8", "--batch-size", "1", "--steps", "1", "--no-save-model"]
    assert main(["train", "--config", "model.json", "--data", "text", *short]) == 0
    newest = max(path for path in Path("runs").iterdir() if path.name != "one")
    assert not (newest / "model").exists()
    assert main(["generate", str(newest)]) == 2
    assert "neither a model folder" in capsys.readouterr().err


def test_tokens_are_those_of_transformers() -> None:
    """Its own greedy generation, which has no cache limit here, and feeds the same tokens."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64)).eval()
    prompt = [5, 6, 7]
    right = model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert list(sample(model, prompt, GREEDY)) == right[0, 3:].tolist()


def test_text_ends_where_the_model_says() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64)).eval()
    whole = list(sample(model, [5, 6, 7], GREEDY))
    assert list(sample(model, [5, 6, 7], GREEDY, {whole[-1]})) == whole[: whole.index(whole[-1])]
    model.generation_config.eos_token_id = [3, 4]
    assert end_tokens(model) == {3, 4}
    model.generation_config.eos_token_id = None
    assert end_tokens(model) == set()


def test_top_k_draws_from_no_other_tokens() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50)).eval()
    with torch.no_grad():
        best = model(torch.tensor([[3]])).logits[0, -1].topk(3).indices.tolist()
    options = [SamplingOptions(tokens=1, temperature=9.0, top_k=3, seed=seed) for seed in range(40)]
    assert {next(sample(model, [3], each)) for each in options} == set(best)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--temperature", "-1"], "--temperature must be 0 or more"),
        (["--temperature", "nan"], "--temperature must be 0 or more"),
        (["--top-k", "-1"], "--top-k must be 0 or more"),
        (["nowhere"], "nowhere is neither a model folder"),
        ([], "no run in the folder runs has left a model"),
    ],
)
def test_what_cannot_work_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_empty_prompt_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", ""]) == 2
    assert "--prompt needs at least one token" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    vocabulary = ByteVocabulary()
    assert vocabulary.decode(vocabulary.encode("naïve ✓")) == "naïve ✓"
    assert vocabulary.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_the_folder_is_one_of_transformers(run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert model.config.n_layer == 1
