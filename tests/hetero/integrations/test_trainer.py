"""hetero/integrations/trainer: Hugging Face's Trainer beside itself with torch.optim.AdamW."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hetero
from tests.support.ecosystem.tiny_models import (
    Sentences,
    arguments,
    figures,
    gpt2_folder,
    llama_folder,
    with_adapters,
)
from tests.support.late import late

transformers, integration = late("transformers"), late("hetero.integrations.trainer")
AutoModelForCausalLM = late("transformers:AutoModelForCausalLM")

LOGGED = ["loss", "eval_loss", "grad_norm", "learning_rate"]


class Interrupted(Exception):
    pass


def interrupt_after(step: int) -> Any:
    """A callback that ends the training as a crash would, after a step that was saved."""

    class Callback(transformers.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == step:
                raise Interrupted

    return Callback()


def managed(folder: Path, policy: str, path: Path, dtype: str = "fp32") -> Any:
    with hetero.ZeroInitContext(placement_policy=policy, dtype=dtype, nvme_path=str(path)):
        return AutoModelForCausalLM.from_pretrained(folder)


def trainer(model: Any, args: Any, kind: Any = None, **others: Any) -> Any:
    kind = kind or integration.Trainer
    return kind(model, args, train_dataset=Sentences(), eval_dataset=Sentences(), **others)


def test_against_a_plain_trainer(tmp_path: Path) -> None:
    """Clipping, accumulation, evaluation, decay groups and the best model at the end."""
    folder = llama_folder(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    wanted = trainer(plain, arguments(tmp_path / "plain"), transformers.Trainer)
    wanted.train()
    model = managed(folder, "nvme", tmp_path)
    with trainer(model, arguments(tmp_path / "managed")) as found:
        found.train()
        for name in LOGGED:
            assert figures(found, name) == pytest.approx(figures(wanted, name), rel=1e-5)
        assert figures(found, "hetero/host_peak_gib")
        best = Path(wanted.state.best_model_checkpoint).name
        assert Path(found.state.best_model_checkpoint).name == best
        for master, param in zip(
            hetero.masters(model.parameters()), plain.parameters(), strict=True
        ):
            torch.testing.assert_close(master, param.detach(), rtol=1e-5, atol=1e-5)
        assert found.evaluate()["eval_loss"] == pytest.approx(
            wanted.evaluate()["eval_loss"], rel=1e-5
        )
        found.save_model(str(tmp_path / "final"))
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
        for master, param in zip(
            hetero.masters(model.parameters()), exported.parameters(), strict=True
        ):
            assert torch.equal(master, param)
    with pytest.raises(hetero.ClosedError):
        model(torch.zeros(1, 4, dtype=torch.long))


def test_an_interrupted_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """With dropout, whose random numbers count; resumed under another policy, and unbuilt.

    The order of the samples is drawn from the process's random numbers, as group_by_length's is:
    the library's own sampler has a generator of its own.
    """
    folder = gpt2_folder(tmp_path / "model")
    given = {"accelerator_config": {"use_seedable_sampler": False}}
    runs: list[Any] = []
    for name, callbacks in (("whole", []), ("cut", [interrupt_after(2)])):
        model = managed(folder, "nvme", tmp_path, "bf16")
        with trainer(model, arguments(tmp_path / name, **given), callbacks=callbacks) as run:
            if callbacks:
                with pytest.raises(Interrupted):
                    run.train()
            else:
                run.train()
                runs.append((run, hetero.masters(model.parameters())))
    torch.manual_seed(99)
    model = AutoModelForCausalLM.from_pretrained(folder)
    options = {"placement_policy": "cpu", "dtype": "bf16"}
    with trainer(model, arguments(tmp_path / "cut", **given), hetero_config=options) as run:
        run.train(resume_from_checkpoint=True)
        whole, masters = runs[0]
        for name in LOGGED:
            assert figures(run, name) == figures(whole, name)
        assert all(map(torch.equal, hetero.masters(model.parameters()), masters))


def test_a_checkpoint_is_a_model_too_and_a_plain_one_is_taken_up(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    args = arguments(tmp_path / "plain", max_steps=2, lr_scheduler_type="constant")
    trainer(plain, args, transformers.Trainer).train()
    model = managed(folder, "cpu", tmp_path)
    args = arguments(tmp_path / "plain", max_steps=4, lr_scheduler_type="constant")
    with trainer(model, args) as run:
        run.train(resume_from_checkpoint=True)
        checkpoint = tmp_path / "plain" / "checkpoint-4"
        stored = load_file(checkpoint / "model.safetensors")
        for name, master in zip(
            dict(model.named_parameters()), hetero.masters(model.parameters()), strict=True
        ):
            assert torch.equal(stored[name], master)
        assert not (checkpoint / "optimizer.pt").exists()
        assert hetero.latest_checkpoint(checkpoint) == checkpoint / "hetero"
    wanted = trainer(
        AutoModelForCausalLM.from_pretrained(folder),
        arguments(tmp_path / "other", max_steps=4, lr_scheduler_type="constant"),
        transformers.Trainer,
    )
    wanted.train()
    assert figures(run, "loss") == pytest.approx(figures(wanted, "loss"), rel=1e-5)


def test_adapters(tmp_path: Path) -> None:
    """Checkpoints have the adapters as peft reads them, and a resumed run has the same bits."""
    from peft import PeftModel

    folder = llama_folder(tmp_path / "model")
    wanted = trainer(
        with_adapters(AutoModelForCausalLM.from_pretrained(folder)),
        arguments(tmp_path / "plain"),
        transformers.Trainer,
    )
    wanted.train()
    runs = []
    for resumed in (False, True):
        model = with_adapters(managed(folder, "nvme", tmp_path), seed=4 if resumed else 3)
        with trainer(model, arguments(tmp_path / "managed")) as run:
            checkpoint = str(tmp_path / "managed" / "checkpoint-2")
            run.train(resume_from_checkpoint=checkpoint if resumed else None)
            assert figures(run, "loss") == pytest.approx(figures(wanted, "loss"), rel=1e-5)
            runs.append([figures(run, "loss"), hetero.masters(model.parameters())])
            run.save_model(str(tmp_path / "adapter"))
            final = {
                name: param.clone() for name, param in model.named_parameters() if "lora" in name
            }
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))
    assert not list((tmp_path / "managed" / "checkpoint-2").glob("model*.safetensors"))
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "adapter")
    )
    read = {name: param for name, param in again.named_parameters() if "lora" in name}
    assert read.keys() == final.keys()
    assert all(torch.equal(read[name], param) for name, param in final.items())


def test_the_mixin_takes_optimizers_that_are_given(tmp_path: Path) -> None:
    class Mine(integration.HeteroTrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    folder = llama_folder(tmp_path / "model")
    args = arguments(
        tmp_path / "out", max_steps=1, eval_strategy="no", load_best_model_at_end=False
    )
    for given in (
        {"optimizer_cls_and_kwargs": (hetero.HybridLion, {"lr": 1e-3})},
        {"optimizers": (None, None)},
    ):
        model = managed(folder, "cpu", tmp_path)
        if "optimizers" in given:
            given = {"optimizers": (hetero.HybridLion(model.parameters(), lr=1e-3), None)}
        with trainer(model, args, Mine, **given) as run:
            run.train()
            assert type(run.optimizer.optimizer) is hetero.HybridLion


@pytest.mark.parametrize(
    ("name", "kind", "state_dtype"),
    [
        ("adamw_torch", hetero.HybridAdam, "fp32"),
        ("paged_adamw_8bit", hetero.HybridAdam, "8bit"),
        ("lion_32bit", hetero.HybridLion, "fp32"),
        ("adagrad", hetero.HybridAdagrad, "fp32"),
        ("sgd", hetero.HybridSGD, "fp32"),
    ],
)
def test_optimizers_by_name(name: str, kind: Any, state_dtype: str, tmp_path: Path) -> None:
    model = managed(llama_folder(tmp_path / "model"), "cpu", tmp_path)
    args = arguments(tmp_path, optim=name, learning_rate=0.25, adam_beta1=0.5)
    optimizer = trainer(model, args).create_optimizer()
    assert type(optimizer) is kind
    assert optimizer.state_dtype == state_dtype
    decays, others = optimizer.param_groups
    assert decays["lr"] == 0.25
    assert (decays["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert decays.get("betas", (0.5,))[0] == 0.5
    model.zero_grad()


def test_each_training_asks_the_arguments_anew(tmp_path: Path) -> None:
    """As a search among learning rates does, with a new model for each."""
    folder = llama_folder(tmp_path / "model")
    args = arguments(tmp_path, max_steps=1, eval_strategy="no", load_best_model_at_end=False)
    run = trainer(None, args, model_init=lambda: managed(folder, "cpu", tmp_path))
    for rate, optim, kind in (
        (1e-2, "adamw_torch", hetero.HybridAdam),
        (0.25, "sgd", hetero.HybridSGD),
    ):
        args.learning_rate, args.optim = rate, optim
        with run:
            run.train()
            assert figures(run, "learning_rate") == [rate]
            assert type(run.optimizer.optimizer) is kind


def test_arguments_that_cannot_work(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    run = trainer(plain, arguments(tmp_path, optim="adafactor"))
    with pytest.raises(ValueError, match=r"optim='adafactor' is none of hetero's.*adamw_torch"):
        run.create_optimizer()
    run = trainer(plain, arguments(tmp_path, optim_args="a=1"))
    with pytest.raises(ValueError, match=r"optim_args='a=1'.*optimizer_cls_and_kwargs"):
        run.create_optimizer()
    adam = torch.optim.AdamW(plain.parameters())
    with pytest.raises(ValueError, match=r"the optimizer is AdamW, and a model that"):
        trainer(plain, arguments(tmp_path), optimizers=(adam, None)).create_optimizer()
    with pytest.raises(ValueError, match=r"dtype='fp16' with hetero's own loss scale.*bf16"):
        trainer(plain, arguments(tmp_path), hetero_config={"dtype": "fp16"})
    for name, value in (("deepspeed", {"x": 1}), ("fsdp", "full_shard"), ("n_gpu", 2)):
        args = arguments(tmp_path)
        # (Setting them by the constructor needs these libraries, and GPUs.)
        object.__setattr__(args, "_n_gpu" if name == "n_gpu" else name, value)
        with pytest.raises(ValueError, match=r"2 GPUs|shards and offloads the model itself"):
            trainer(plain, args)
    # Before a training, at whose end evaluate() would cast.
    with pytest.raises(ValueError, match=r"bf16_full_eval casts the model.*dtype='bf16'"):
        trainer(plain, arguments(tmp_path, bf16_full_eval=True))


class OlderTrainer:
    """As some of transformers: the first rank alone saves, and waits for the others for ever."""

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.args.should_save:
            self._save(output_dir)


@pytest.mark.parametrize("leads", [True, False])
def test_each_rank_saves_whatever_the_library_does(leads: bool) -> None:
    exported: list[Path] = []

    class Sharded(integration.HeteroTrainerMixin, OlderTrainer):  # type: ignore[misc]
        engine, _model = object(), torch.nn.Linear(1, 1)

        def __init__(self) -> None:
            self.args = SimpleNamespace(should_save=leads)

        def _export(self, folder: Path) -> None:
            exported.append(folder)

    Sharded().save_model("there")
    assert exported == [Path("there")]


@pytest.mark.usefixtures("quick_python")
def test_two_ranks_are_one_with_the_batches_of_both(tmp_path: Path) -> None:
    """Under torchrun, without DistributedDataParallel; saved and resumed."""
    folder = llama_folder(tmp_path / "model")
    args = arguments(tmp_path / "plain", per_device_train_batch_size=4, max_grad_norm=1.0)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    wanted = trainer(plain, args, transformers.Trainer)
    wanted.train()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    script = Path(__file__).parents[2] / "support" / "ecosystem" / "trainer_ranks.py"
    subprocess.run([*command, str(script), str(folder), str(tmp_path)], check=True)
    found = json.loads((tmp_path / "losses.json").read_text())
    assert found["resumed"] == found["whole"]
    assert found["whole"] == pytest.approx(figures(wanted, "loss"), rel=1e-4)
