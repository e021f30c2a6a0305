"""`hetero finetune`: from a folder of Hugging Face's to another one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetero.cli.finetune.chat import Encoder
from hetero.cli.finetune.examples import Collation, Examples
from hetero.cli.finetune.formats import Conversation, parse
from hetero.cli.finetune.records import read_records
from hetero.cli.job.optimization import ADAM_BETAS, lr_factor
from hetero.cli.main import main
from tests.support.ecosystem.tiny_models import gpt2_folder
from tests.support.ecosystem.tiny_tokenizer import CHAT_TEMPLATE, model_folder
from tests.support.ranks.processes import RankPool

LR, SEQ_LEN = 1e-2, 64
COMMON = ["--seq-len", f"{SEQ_LEN}", "--lr", f"{LR}", "--warmup", "1", "--dtype", "fp32"]
ALPACA = [
    {"instruction": f"What is {n}?", "input": "" if n % 2 else "In words.", "output": "It is. " * n}
    for n in range(1, 9)
]


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a run on instructions, in an empty working folder."""
    model_folder(tmp_path / "model", CHAT_TEMPLATE)
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, ALPACA)))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return ["finetune", "--model", "../model", "--data", "../data.jsonl", *COMMON]


def losses(folder: str) -> list[float]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def parameters(model: Any) -> list[torch.Tensor]:
    return [param.detach() for param in model.parameters()]


def test_a_whole_model_against_plain_torch(arguments: list[str]) -> None:
    options = ["--batch-size", "2", "--accumulate", "2", "--epochs", "2", "--run-dir", "run"]
    assert main([*arguments, *options, "--output", "out", "--chat-template", "default"]) == 0
    tokenizer = AutoTokenizer.from_pretrained("../model")
    tokenizer.chat_template = None
    encoder = Encoder(tokenizer, SEQ_LEN)
    conversations = [parse(record) for record in read_records("../data.jsonl")]
    rows = [[encoder.conversation(c)] for c in conversations if isinstance(c, Conversation)]
    data = Examples(rows, Collation(int(tokenizer.pad_token_id), None), "", 0, 4)
    model = AutoModelForCausalLM.from_pretrained("../model").train()
    adam = torch.optim.AdamW(model.parameters(), lr=LR, betas=ADAM_BETAS, weight_decay=0.0)
    expected = []
    for step in range(4):
        adam.param_groups[0]["lr"] = LR * lr_factor(step, 1, 4, "cosine")
        # All examples of a step at once: its loss is the mean over all labels.
        (batch,) = data.step(4, 1)
        loss = model(**batch.inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        expected.append(loss.item())
    assert losses("run") == pytest.approx(expected, rel=1e-5)
    exported = AutoModelForCausalLM.from_pretrained("out")
    for found, wanted in zip(parameters(exported), parameters(model), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained("out").chat_template == tokenizer.chat_template


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_adapter_merged_by_us_and_by_peft(dtype: str, arguments: list[str]) -> None:
    from peft import PeftModel

    options = [*arguments, "--lora-rank", "4", "--max-steps", "2", "--packing", "--dtype", dtype]
    assert main([*options, "--output", "adapter", "--run-dir", "a"]) == 0
    assert main([*options, "--output", "merged", "--run-dir", "m", "--merge"]) == 0
    assert losses("a") == losses("m")
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    base = AutoModelForCausalLM.from_pretrained("../model").to(kind)
    before = [param.clone() for param in parameters(base)]
    wanted = PeftModel.from_pretrained(base, "adapter", autocast_adapter_dtype=False)
    wanted = wanted.merge_and_unload()
    assert not all(map(torch.equal, parameters(wanted), before))
    merged = AutoModelForCausalLM.from_pretrained("merged")
    for one, other in zip(parameters(merged), parameters(wanted), strict=True):
        assert torch.equal(one, other)
    assert AutoTokenizer.from_pretrained("merged").chat_template == CHAT_TEMPLATE


def test_a_resumed_run_has_the_same_bits(arguments: list[str]) -> None:
    """With dropout in the adapter, in bf16, from the middle of an epoch; exported once more."""
    options = [*arguments, "--lora-rank", "4", "--lora-dropout", "0.1", "--dtype", "bf16"]
    options += ["--max-steps", "5", "--batch-size", "3", "--save-every", "2", "--keep", "9"]
    assert main([*options, "--output", "out", "--run-dir", "run"]) == 0
    whole, file = losses("run"), Path("out/adapter_model.safetensors")
    weights = file.read_bytes()
    for name in ("step-000004", "step-000005"):
        shutil.rmtree(Path("run/checkpoints") / name)
    file.write_bytes(b"")
    assert main([*options, "--output", "out", "--run-dir", "run"]) == 2
    resumed = [*options, "--output", "out", "--run-dir", "run", "--resume", "--policy", "cpu"]
    assert main(resumed) == 0
    assert losses("run") == whole
    assert file.read_bytes() == weights


def test_a_result_replaces_one_of_another_kind(arguments: list[str]) -> None:
    """An adapter in the folder of a whole model would be loaded instead of it."""
    options = [*arguments, "--lora-rank", "4", "--save-every", "1", "--run-dir", "run"]
    assert main([*options, "--max-steps", "1", "--output", "out"]) == 0
    Path("out/notes.safetensors").touch()
    options += ["--output", "out", "--resume"]
    assert main([*options, "--max-steps", "2", "--merge"]) == 0
    assert not list(Path("out").glob("adapter_*"))
    assert main([*arguments, "--max-steps", "2", "--output", "plain", "--run-dir", "p"]) == 0
    found = {path.name for path in Path("out").iterdir()}
    wanted = {path.name for path in Path("plain").iterdir()}
    assert found == wanted | {"notes.safetensors", "README.md"}
    assert not hasattr(AutoModelForCausalLM.from_pretrained("out"), "peft_config")
    assert main([*options, "--max-steps", "3"]) == 0
    assert Path("out/adapter_model.safetensors").exists()
    assert not Path("out/config.json").exists()
    assert not Path("out/model.safetensors").exists()


def test_a_run_goes_on_with_steps_of_the_same_size(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*arguments, "--output", "out", "--run-dir", "run", "--save-every", "1"]
    assert main([*options, "--batch-size", "4", "--max-steps", "1"]) == 0
    options += ["--resume", "--epochs", "2"]
    assert main([*options, "--batch-size", "2"]) == 2
    said = "took 4 sequences a step, and now it would take 2; give --batch-size, --grad-accum and"
    assert said in capsys.readouterr().err
    assert main([*options, "--batch-size", "2", "--accumulate", "2"]) == 0
    assert len(losses("run")) == 4
    assert main([*options, "--batch-size", "4"]) == 2
    said = "has all 4 steps; to go on from it ask for more than --epochs 2, or give --max-steps"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("cache", [True, False])
def test_an_export_keeps_the_setting_of_a_cache(cache: bool, arguments: list[str]) -> None:
    files = [Path("../model") / name for name in ("config.json", "generation_config.json")]
    own = json.loads(files[0].read_text())
    files[0].write_text(json.dumps({**own, "use_cache": cache}))
    files[1].unlink()
    assert main([*arguments, "--max-steps", "1", "--output", "out"]) == 0
    model = AutoModelForCausalLM.from_pretrained("out")
    assert model.config.use_cache is cache
    assert model.generation_config.use_cache is cache


def test_texts_are_packed(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    options = [*arguments, "--data", "../text.txt", "--max-steps", "6", "--run-dir", "run"]
    assert main([*options, "--output", "out", "--tiled-loss"]) == 0
    found = losses("run")
    assert found[-1] < found[0] - 0.5


def test_two_ranks_are_one_with_two_micro_batches(
    arguments: list[str], ranks2: RankPool, tmp_path: Path
) -> None:
    options = [*arguments, "--lora-rank", "4", "--merge", "--max-steps", "3"]
    assert main([*options, "--accumulate", "2", "--output", "one", "--run-dir", "r1"]) == 0
    ranks2.run(run_in, str(Path.cwd()), [*options, "--output", "two", "--run-dir", "r2"])
    assert losses("r2") == pytest.approx(losses("r1"), rel=1e-5)
    one, two = (AutoModelForCausalLM.from_pretrained(name) for name in ("one", "two"))
    for found, wanted in zip(parameters(two), parameters(one), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def run_in(rank: int, world: int, folder: str, options: list[str]) -> bool:
    """The command on a rank."""
    os.chdir(folder)
    assert main(options) == 0
    return True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "none.jsonl"], "--data none.jsonl: no such file or folder"),
        (["--data", "bad.jsonl"], "bad.jsonl, line 2: 'output' is missing (it has 'instruction')"),
        (["--data", "bad.jsonl", "--format", "text"], "bad.jsonl, line 1: 'text' is missing"),
        (["--model", "none"], "--model none has no config.json; give the folder"),
        (["--model", "gpt2"], "--model gpt2 has no tokenizer; put tokenizer.json"),
        (["--seq-len", "512"], "--seq-len 512 is more than the 128 positions of the model"),
        (["--seq-len", "4"], "data.jsonl, line 1: of"),
        (["--output", "full"], "--output full is not empty; give a new folder, or --resume"),
        (["--output", "bad.jsonl"], "--output bad.jsonl is a file"),
        (["--output", ""], "--output is missing"),
        (["--output", "bad.jsonl/out"], "--output bad.jsonl/out cannot be written: Not a dir"),
        (["--output", "/proc/hetero"], "--output /proc/hetero cannot be written"),
        (["--output", "../model", "--resume"], "--output ../model is the folder of --model"),
        (["--merge"], "--merge, --lora-alpha and --lora-dropout are about an adapter"),
        (["--lora-dropout", "1"], "--lora-dropout must be in [0, 1), got 1.0"),
        (["--epochs", "0"], "--epochs must be more than 0, got 0.0"),
        (["--chat-template", "none"], "cannot read --chat-template none: No such file"),
        (["--host-memory", "1KiB"], "the smallest"),
        (["--nvme-path", "/dev"], "whose files are RAM"),
    ],
)
def test_what_cannot_work_is_said_before_training(
    options: list[str], said: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.jsonl").write_text(f'{json.dumps(ALPACA[0])}\n{{"instruction": "Q"}}\n')
    if "gpt2" in options:
        gpt2_folder(Path("gpt2"))
    Path("full").mkdir()
    Path("full/file").touch()
    assert main([*arguments, "--output", "out", *options]) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_what_is_missing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune"]) == 2
    assert "--model is missing" in capsys.readouterr().err
    assert main(["finetune", "--model", "../model"]) == 2
    assert "--data is missing" in capsys.readouterr().err
