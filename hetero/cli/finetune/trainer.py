"""TRL's trainer over hetero, as the options say, and what a run folder gets of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from datasets import Dataset
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import hetero
from hetero.cli.options import FinetuneOptions
from hetero.integrations.trainer import HeteroTrainerMixin
from hetero.job.checkpoints import Branch
from hetero.job.job import BuiltModel
from hetero.job.loop import Observer, require_number
from hetero.job.optimization import make_optimizer
from hetero.job.ranks import Ranks
from hetero.job.run_folder import CHECKPOINTS_NAME, RunFolder
from hetero.reporting.recorder import Recorder
from hetero.reporting.report import StepsRecording
from hetero.reporting.run_record import RunFacts, RunRecord

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = SFTTrainer


class FinetuneTrainer(HeteroTrainerMixin, _Base):
    """trl.SFTTrainer that trains with hetero, and says in checkpoints which run they are of."""

    def __init__(
        self, *args: Any, tiled: bool, about: dict[str, Any], branch: Branch, **kwargs: Any
    ) -> None:
        """`tiled`: hetero.tile_heads() has the model's head. `about`: for `extra` of each
        checkpoint, beside the branch."""
        self._tiled = tiled
        self._about = about
        self._branch = branch
        self._step_loss, self._step_tokens = 0.0, 0
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any) -> Any:
        """As the library's; loss and tokens are kept for taken_step()."""
        mask = inputs.get("attention_mask")  # there is none of packed records
        self._step_tokens += inputs["input_ids"].numel() if mask is None else int(mask.sum())
        loss = super().training_step(model, inputs, *args)
        self._step_loss += loss.item()
        return loss

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """TRL's; of a tiled head the model's own, which hetero computes in smaller tiles.

        TRL's tiles are of 4,096 tokens times 32,768 words: without a GPU several copies of such a
        tile take more memory than whole logits of a few thousand tokens.
        """
        if not self._tiled:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs["use_cache"] = False  # as TRL's
        return transformers.Trainer.compute_loss(
            self, model, inputs, return_outputs, num_items_in_batch
        )

    def taken_step(self) -> tuple[float, int]:
        """This rank's loss and tokens of the step that was computed."""
        taken = self._step_loss, self._step_tokens
        self._step_loss, self._step_tokens = 0.0, 0
        return taken

    def _checkpoint_extra(self) -> dict[str, Any]:
        lineage = self._branch.lineage.as_extra
        step = {"step": self.state.global_step}
        return {**super()._checkpoint_extra(), **step, **self._about, **lineage}


class RunCallback(TrainerCallback):
    """Keeps of a Trainer's run what `hetero train` keeps of its own, and ends it at SIGTERM.

    Attributes:
        recorder: of the engine's steps; there is none before training begins.
        result: of the run; None before training begins.
        terminated: SIGTERM has come to a rank, as all know.
    """

    def __init__(
        self,
        trainer: FinetuneTrainer,
        options: FinetuneOptions,
        begin: Callable[[hetero.Engine, int], RunFacts],
        branch: Branch,
        folder: RunFolder,
        observer: Observer,
        ranks: Ranks,
    ) -> None:
        """`begin` makes what is known of the run of its engine and of so many steps."""
        self.recorder: Recorder
        self.result: RunRecord | None = None
        self.terminated = False
        self._signalled = False  # this rank
        self._trainer = trainer
        self._options = options
        self._begin = begin
        self._branch = branch
        self._folder = folder
        self._observer = observer
        self._ranks = ranks
        self._tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begins to record."""
        engine = self._trainer.initialize()
        self._recording = StepsRecording(engine)
        self.recorder = Recorder(engine, notes_compute=True)
        setting = self._begin(engine, state.max_steps)
        self.result = RunRecord(setting, notes=setting.notes)
        self._folder.go_on_after(state.global_step)
        self._observer.begin(setting)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Raises DivergedError, on all ranks before any updates, if the loss is no number."""
        loss, tokens = self._trainer.taken_step()
        require_number(self._ranks.mean(loss), state.global_step + 1, self._options)
        self._tokens = int(sum(self._ranks.gather(tokens)))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """All ranks end if SIGTERM has come to one."""
        self.terminated = any(self._ranks.gather(self._signalled))
        if self.terminated:
            control.should_save = control.should_training_stop = True
        self._branch.note()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Keeps the metrics of each step and of each evaluation."""
        logs: dict[str, Any] = given["logs"]
        recorder, result, step = self.recorder, self.result, state.global_step
        assert result is not None
        said = {name: value for name, value in logs.items() if not name.startswith("hetero/")}
        if "eval_loss" in logs:
            result.eval_losses.append((step, logs["eval_loss"]))
            if self._ranks.leads:
                print(f"step {step}  evaluation loss {logs['eval_loss']:.4f}", file=sys.stderr)
            self._folder.append_metrics({"step": step, **said})
        if "loss" not in logs:
            return
        state.log_history.pop()  # or each checkpoint has the figures of all steps
        point = recorder.end_step(logs["loss"], self._tokens, step=step)
        self._recording.end_step(len(result.every_step) + 1)
        norm, lr = logs.get("grad_norm"), logs["learning_rate"]
        point = replace(point, grad_norm=norm, lr=lr)
        result.add(point)
        self._folder.append_metrics({**said, **point.as_dict(recorder.begin_s)})
        self._observer.step(point)

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Leaves the time that it took out of the next step."""
        self.recorder.begin_step()

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Notes the checkpoint, and leaves its time out of the next step."""
        assert self.result is not None
        name = f"checkpoint-{state.global_step}"
        self.result.checkpoint = str(self._folder.path / CHECKPOINTS_NAME / name)
        self.recorder.begin_step()

    def note_sigterm(self) -> None:
        """Ends the run after the step that is under way."""
        self._signalled = True

    def close(self) -> None:
        """Ends recording; idempotent."""
        if self.result is not None:
            self._recording.close()
            self.result.timeline = self._recording.timeline
            self.recorder.close()


def make_trainer(
    options: FinetuneOptions,
    folder: RunFolder,
    built: BuiltModel,
    tokenizer: Any,
    data: tuple[Dataset, Dataset | None],
    about: dict[str, Any],
    branch: Branch,
) -> FinetuneTrainer:
    """The trainer, ready to train on `data`, the records and those to evaluate on.

    Its checkpoints are in the run folder, and have what `about` says.
    """
    model: Any = built.model
    stops, every = options.early_stopping_patience, options.eval_steps
    evaluates = "no" if data[1] is None else "steps" if every else "epoch"
    on_cpu = options.backend in ("cpu", "emulated") or not torch.cuda.is_available()
    arguments = SFTConfig(
        output_dir=str(folder.path / CHECKPOINTS_NAME),
        seed=options.seed,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        bf16=False,  # parameters are in --dtype
        use_cache=getattr(model.config, "use_cache", False),  # stays what it is
        max_length=options.seq_len,
        packing=options.packing,
        num_train_epochs=options.epochs,
        max_steps=options.max_steps or -1,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        gradient_checkpointing=False,  # build_in_budgets() has seen to it
        max_grad_norm=options.clip,
        learning_rate=options.lr,
        warmup_steps=options.warmup,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(options.schedule, "cosine"),
        eval_strategy=evaluates,
        eval_steps=every,
        save_strategy=evaluates if stops else "steps" if options.save_every else "no",
        save_steps=(every if stops else options.save_every) or 1,
        save_total_limit=options.keep,
        load_best_model_at_end=bool(stops),
        restore_callback_states_from_checkpoint=bool(stops),
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=options.report_to.split(","),
    )
    trainer = FinetuneTrainer(
        model,
        arguments,
        train_dataset=data[0],
        eval_dataset=data[1],
        processing_class=tokenizer,
        optimizers=(make_optimizer(options, model), None),
        tiled=built.tiled,
        about=about,
        branch=branch,
    )
    trainer.remove_callback(PrinterCallback)
    if stops:
        trainer.add_callback(EarlyStoppingCallback(stops))
    return trainer
