"""`hetero finetune`: from a folder of Hugging Face's to another one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.cli.main import main
from hetero.cli.observers import LineObserver
from hetero.job.optimization import ADAM_BETAS
from hetero.reporting.run_record import RunRecord, StepPoint
from tests.support.cli_runs import Refuses, run_all, touch, words_of
from tests.support.ecosystem.tiny_models import gpt2_folder
from tests.support.ecosystem.tiny_tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, model_folder
from tests.support.late import late
from tests.support.ranks.processes import run_ranks

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="pip install 'hetero[finetune]'")
hf, trl, data = map(late, ("transformers", "trl", "hetero.cli.finetune.data"))

LR, SEQ_LEN = 1e-2, 64
COMMON = f"--seq-len {SEQ_LEN} --learning-rate {LR} --warmup-steps 1 --dtype fp32 --log-every 1"
Tune = Callable[..., None]
ALPACA = [
    {"instruction": f"What is {n}?", "input": "" if n % 2 else "In words.", "output": "It is. " * n}
    for n in range(1, 9)
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model."""
    return model_folder(tmp_path_factory.mktemp("tiny"), CHAT_TEMPLATE)


@pytest.fixture
def command(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a run on instructions, in an empty working folder; it draws nothing, to be quick."""
    monkeypatch.setattr("hetero.reporting.charts.draw_picture", touch)
    monkeypatch.setattr("hetero.reporting.page.write_page", write_points)
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, ALPACA)))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return f"finetune --model ../model --data ../data.jsonl {COMMON}"


@pytest.fixture
def tune(command: str) -> Callable[..., None]:
    """Makes such a run with more options, which must succeed."""

    def run(*options: str) -> None:
        assert main(words_of(command, *options)) == 0

    return run


def write_points(record: RunRecord, path: Path) -> None:
    path.write_text(json.dumps([[point.last, point.loss] for point in record.points]))


def logged(folder: str, name: str = "loss") -> list[float]:
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def parameters(model: Any) -> list[torch.Tensor]:
    return [param.detach() for param in model.parameters()]


def close(one: Any, other: Any) -> None:
    for found, wanted in zip(parameters(one), parameters(other), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_a_whole_model_against_plain_trl(packing: bool, tune: Tune) -> None:
    options = "--batch-size 2 --grad-accum 2 --epochs 2 --chat-template default --policy nvme"
    tune(options, "--packing" if packing else "", "--run-dir run --output out")
    tokenizer = hf.AutoTokenizer.from_pretrained("../model")
    tokenizer.chat_template = data.DEFAULT_TEMPLATE
    model = hf.AutoModelForCausalLM.from_pretrained("../model").train()
    given = trl.SFTConfig(
        output_dir="plain",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        max_length=SEQ_LEN,
        packing=packing,
        learning_rate=LR,
        warmup_steps=1,
        lr_scheduler_type="cosine",
        seed=0,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    rows = data.read_data("../data.jsonl", tokenizer, SEQ_LEN, "auto")
    adam = torch.optim.AdamW(model.parameters(), lr=LR, betas=ADAM_BETAS, weight_decay=0.0)
    plain = trl.SFTTrainer(model, given, None, rows, None, tokenizer, optimizers=(adam, None))
    plain.train()
    wanted = [each["loss"] for each in plain.state.log_history if "loss" in each]
    assert len(wanted) == 4
    assert logged("run") == pytest.approx(wanted, rel=1e-4)
    assert wanted[-1] < wanted[0]
    close(hf.AutoModelForCausalLM.from_pretrained("out"), model)
    assert hf.AutoTokenizer.from_pretrained("out").chat_template == data.DEFAULT_TEMPLATE


def test_an_adapter_merged_by_us_and_by_peft(tune: Tune) -> None:
    from peft import PeftModel

    options = "--lora-rank 4 --max-steps 3 --packing --dtype bf16"
    tune(options, "--output adapter --run-dir a")
    tune(options, "--output merged --run-dir m --merge")
    assert logged("a") == logged("m")
    assert logged("a")[-1] < logged("a")[0]
    # From any folder: transformers would look for a name that is no folder on the network.
    named = json.loads(Path("adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(named) == Path("../model").resolve()
    base = hf.AutoModelForCausalLM.from_pretrained("../model").to(torch.bfloat16)
    before = [param.clone() for param in parameters(base)]
    wanted = PeftModel.from_pretrained(base, "adapter", autocast_adapter_dtype=False)
    wanted = wanted.merge_and_unload()
    assert not all(map(torch.equal, parameters(wanted), before))
    merged = hf.AutoModelForCausalLM.from_pretrained("merged")
    for one, other in zip(parameters(merged), parameters(wanted), strict=True):
        assert torch.equal(one, other)
    assert hf.AutoTokenizer.from_pretrained("merged").chat_template == CHAT_TEMPLATE


def test_a_resumed_run_has_the_same_bits(command: str, tune: Tune, refuses: Refuses) -> None:
    """With dropout in the adapter, in bf16, from the middle of an epoch; exported once more. It
    goes back in a folder of its own."""
    options = "--lora-rank 4 --lora-dropout 0.1 --dtype bf16 --max-steps 4 --batch-size 3"
    options += " --save-steps 1 --save-total-limit 9 --output out"
    tune(options, "--run-dir run")
    whole, file = logged("run"), Path("out/adapter_model.safetensors")
    weights = file.read_bytes()
    shutil.rmtree("run/checkpoints/checkpoint-4")
    Path("run/checkpoints/checkpoint-3/trainer_state.json").unlink()  # as after a crash
    file.write_bytes(b"")
    refuses("--output out is not empty", command, options, "--run-dir new")
    tune(options, "--run-dir run --resume --policy cpu")
    assert logged("run") == whole
    assert file.read_bytes() == weights
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["notes"][-1] == "resumed after step 2 from run/checkpoints/checkpoint-2"
    numbers = [[step, loss] for step, loss in enumerate(whole, start=1)]
    assert json.loads(Path("run/report.html").read_text()) == numbers[2:]
    back = "--resume run/checkpoints/checkpoint-2"
    refuses("is not the last checkpoint of its run", command, options, back)
    tune(options, back, "--run-dir branch")
    assert logged("branch") == whole[2:]


def test_a_result_replaces_one_of_another_kind(
    command: str, tune: Tune, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter in the folder of a whole model would be loaded instead of it. A result that cannot
    be written replaces nothing."""

    def fail(model: Any) -> None:
        raise OSError("the disk is full")

    options = "--lora-rank 4 --save-every 1 --run-dir run --output out"
    tune(options, "--max-steps 1")
    Path("out/notes.safetensors").touch()
    options += " --resume"
    tune(options, "--max-steps 2 --merge")
    assert not list(Path("out").glob("adapter_*"))
    tune("--max-steps 1 --output plain --run-dir p")
    found = {path.name for path in Path("out").iterdir()}
    wanted = {path.name for path in Path("plain").iterdir()}
    assert found == wanted | {"notes.safetensors", "README.md"}
    assert not hasattr(hf.AutoModelForCausalLM.from_pretrained("out"), "peft_config")
    with monkeypatch.context() as context:
        context.setattr("hetero.cli.finetune.run.adapter_state", fail)
        said = "hetero finetune: error: the disk is full"
        refuses(said, command, options, "--max-steps 3", code=1)
    assert {path.name for path in Path("out").iterdir()} == found
    tune(options, "--max-steps 4")
    assert Path("out/adapter_model.safetensors").exists()
    assert not Path("out/config.json").exists()
    assert not Path("out/model.safetensors").exists()


def test_a_run_goes_on_with_steps_of_the_same_size(
    command: str, tune: Tune, refuses: Refuses
) -> None:
    options = "--output out --run-dir run --save-every 1"
    tune(options, "--batch-size 4 --max-steps 1")
    more = f"{options} --resume --epochs 2"
    said = "has 4 as sequences_per_step, and now it is 2; give --data, --seq-len and --seed as they"
    refuses(said, command, more, "--batch-size 2")
    refuses("has 0 as seed, and now it is 3", command, more, "--batch-size 4 --seed 3")
    tune(more, "--batch-size 2 --grad-accum 2")
    assert len(logged("run")) == 4
    said = "has all 4 steps; to go on from it ask for more than --epochs 2"
    refuses(said, command, more, "--batch-size 4")
    said = "--resume none is no checkpoint, and has none in it"
    refuses(said, command, options, "--resume none --batch-size 4 --epochs 3")


def test_texts_are_learned_whole(tune: Tune) -> None:
    """The result keeps the model's setting of a cache."""
    files = [Path("../model") / name for name in ("config.json", "generation_config.json")]
    own = json.loads(files[0].read_text())
    files[0].write_text(json.dumps({**own, "use_cache": False}))
    files[1].unlink()
    Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    options = "--data text.txt --max-steps 4 --gradient-checkpointing"
    tune(options, "--run-dir run --output out")
    found = logged("run")
    assert found[-1] < found[0] - 0.5
    model = hf.AutoModelForCausalLM.from_pretrained("out")
    assert model.config.use_cache is False
    assert model.generation_config.use_cache is False


def test_a_tiled_loss(tune: Tune) -> None:
    """The same losses, of batches and of evaluations."""
    options = "--lora-rank 4 --max-steps 2 --grad-accum 2 --batch-size 2 --eval-data ../data.jsonl"
    tune(options, "--output whole --run-dir w --no-tiled-loss")
    tune(options, "--output tiled --run-dir t --tiled-loss")
    for name in ("loss", "eval_loss", "tokens"):
        assert logged("t", name) == pytest.approx(logged("w", name), rel=1e-5)


def test_packed_records_see_themselves_alone(tune: Tune) -> None:
    """The loss of the first step is that of the same records, padded; with a window, too."""
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 12}
    torch.manual_seed(0)
    model = hf.MistralForCausalLM(hf.MistralConfig(vocab_size=VOCAB_SIZE, **config, **heads))
    model.save_pretrained("../model")
    options = "--max-steps 1 --batch-size 8"
    tune(options, "--output padded --run-dir p")
    tune(options, "--output packed --run-dir q --packing")
    assert logged("q") == pytest.approx(logged("p"), rel=1e-5)


def test_the_best_of_evaluations_is_written(tune: Tune) -> None:
    """The learning rate makes a run worse, which ends early."""
    evaluated = "--eval-data ../data.jsonl"
    options = "--eval-steps 1 --lr 3 --early-stopping-patience 2 --epochs 9"
    tune(evaluated, options, "--report-to tensorboard --output out --run-dir run")
    found = logged("run", "eval_loss")
    best = found.index(min(found))
    assert len(found) == best + 3
    assert list(Path("run").rglob("events.out.tfevents.*"))
    summary = json.loads(Path("run/summary.json").read_text())
    assert min(loss for _, loss in summary["eval_losses"]) == found[best]
    tune(evaluated, "--model out --output again --lr 0 --max-steps 1 --run-dir again-run")
    assert logged("again-run", "eval_loss")[0] == pytest.approx(found[best], rel=1e-5)


@pytest.mark.usefixtures("nothing_left")
def test_sigterm_saves_and_ends(command: str, tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(observer: LineObserver, metrics: StepPoint) -> None:
        if metrics.last == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LineObserver, "step", end)
    before = signal.getsignal(signal.SIGTERM)
    options = "--output out --run-dir run --save-every 9999"
    assert main(words_of(command, options, "--epochs 9999")) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(logged("run")) == 3  # the step under way is made
    assert not list(Path("out").iterdir())
    tune(options, "--max-steps 4 --resume")
    assert len(logged("run")) == 4
    assert hf.AutoModelForCausalLM.from_pretrained("out")


@pytest.mark.usefixtures("nothing_left")
def test_a_loss_that_is_no_number_ends_the_run(command: str, refuses: Refuses) -> None:
    before = signal.getsignal(signal.SIGTERM)
    options = "--output out --run-dir run --save-every 1 --learning-rate 1e15 --epochs 9"
    refuses("the loss became nan in step", command, options, code=1)
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"
    assert signal.getsignal(signal.SIGTERM) is before
    assert not list(Path("out").iterdir())


def test_two_ranks_are_one_with_two_micro_batches(command: str, tune: Tune) -> None:
    """An adapter that is merged; and they go on where one has ended."""
    common = "--save-every 9 --policy nvme --lora-rank 4 --merge"
    alone = f"{common} --grad-accum 2 --output one.out --run-dir one"
    tune(alone, "--max-steps 2")
    shutil.copytree("one", "more")
    two = f"{common} --output two.out --run-dir two --max-steps 2"
    more = f"{common} --output more.out --run-dir more --max-steps 3 --resume"
    runs = [words_of(command, two), words_of(command, more)]
    run_ranks(2, run_all, str(Path.cwd()), runs, timeout_s=300)
    assert logged("two") == pytest.approx(logged("one"), rel=1e-4)
    close(*(hf.AutoModelForCausalLM.from_pretrained(f"{name}.out") for name in ("one", "two")))
    tune(alone, "--max-steps 3 --resume")
    assert logged("more") == pytest.approx(logged("one"), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "none.jsonl"], "none.jsonl: no such file or folder"),
        (["--data", "bad.jsonl"], "bad.jsonl:2: 'output' is missing (it has ['instruction'])"),
        (["--eval-data", "bad.jsonl"], "bad.jsonl:2: 'output' is missing (it has ['instruction'])"),
        (["--data", "bad.jsonl", "--format", "text"], "bad.jsonl:1: 'text' is missing"),
        (["--model", "none"], "--model none has no config.json; give the folder"),
        (["--model", "gpt2"], "--model gpt2 has no tokenizer; put tokenizer.json"),
        (["--seq-len", "512"], "--seq-len 512 is more than the 128 positions of the model"),
        (["--seq-len", "4"], "data.jsonl:1: of"),
        (["--output", "full"], "--output full is not empty; give a new folder, or --resume"),
        (["--output", "bad.jsonl"], "--output bad.jsonl is a file"),
        (["--output", ""], "--output is missing"),
        (["--output", "bad.jsonl/out"], "--output bad.jsonl/out cannot be written: Not a dir"),
        (["--output", "/proc/hetero"], "--output /proc/hetero cannot be written"),
        (["--output", "../model", "--resume"], "--output ../model is the folder of --model"),
        (["--merge"], "--merge, --lora-alpha, --lora-dropout and --lora-target-modules are about"),
        (["--lora-rank", "2", "--lora-target-modules", "nix"], "nix"),
        (["--early-stopping-patience", "2"], "--eval-data is missing; give the file or folder"),
        (["--dtype", "fp16"], "--dtype must be bf16 or fp32"),
        (["--report-to", "nowhere"], "nowhere"),
        (["--lora-dropout", "1"], "--lora-dropout must be in [0, 1), got 1.0"),
        (["--epochs", "0"], "--epochs must be more than 0, got 0.0"),
        (["--chat-template", "none"], "cannot read --chat-template none: No such file"),
        (["--host-memory", "1KiB"], "the smallest"),
        (["--nvme-path", "/dev"], "whose files are RAM"),
    ],
)
def test_what_cannot_work_is_said_before_training(
    options: list[str], said: str, command: str, refuses: Refuses
) -> None:
    Path("bad.jsonl").write_text(f'{json.dumps(ALPACA[0])}\n{{"instruction": "Q"}}\n')
    if "gpt2" in options:
        gpt2_folder(Path("gpt2"))
    Path("full").mkdir()
    Path("full/file").touch()
    refuses(said, command, "--output out", options)
    assert not Path("runs").exists()


def test_what_is_missing(command: str, refuses: Refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reporter that is not installed, and options."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    said = "--report-to wandb: it is not installed; pip install wandb"
    refuses(said, command, "--output out --report-to tensorboard,wandb")
    refuses("--model is missing", "finetune")
    refuses("--data is missing", "finetune --model ../model")
