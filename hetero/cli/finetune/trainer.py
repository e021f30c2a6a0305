"""TRL's trainer over hetero, as the options say, and what a run folder gets of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers
from datasets import Dataset
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import hetero
from hetero.integrations.trainer import HeteroTrainerMixin
from hetero.job.job import BuiltModel
from hetero.job.optimization import make_optimizer
from hetero.job.options import FinetuneOptions
from hetero.job.run import TrainingRun, require_number
from hetero.job.run_folder import CHECKPOINTS_NAME, RunFolder
from hetero.reporting.recorder import FIRST_TIMELINE, Recorder
from hetero.reporting.run_record import RunFacts

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = SFTTrainer


class FinetuneTrainer(HeteroTrainerMixin, _Base):
    """trl.SFTTrainer that trains with hetero, and says in checkpoints which run they are of."""

    def __init__(self, *args: Any, tiled: bool, about: dict[str, Any], **kwargs: Any) -> None:
        """`tiled`: hetero.tile_heads() has the model's head. `about`: for `extra` of each
        checkpoint."""
        self._tiled = tiled
        self._about = about
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
        step = {"step": self.state.global_step}
        return {**super()._checkpoint_extra(), **step, **self._about}


class RunCallback(TrainerCallback):
    """Tells a run of the steps that a Trainer makes, and the Trainer of a SIGTERM."""

    def __init__(
        self,
        trainer: FinetuneTrainer,
        run: TrainingRun,
        begin: Callable[[hetero.Engine, int], RunFacts],
        notes: Sequence[str],
    ) -> None:
        """`begin` makes what is known of the run of its engine and of so many steps; `notes` say
        what it goes on from."""
        self._trainer = trainer
        self._run = run
        self._begin = begin
        self._notes = notes
        self._tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begins to record."""
        engine = self._trainer.initialize()
        recorder = Recorder(engine, self._begin(engine, state.max_steps), waits=True)
        self._run.begin(recorder, state.global_step, self._notes, FIRST_TIMELINE)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Raises DivergedError, on all ranks before any updates, if the loss is no number."""
        loss, tokens = self._trainer.taken_step()
        ranks = self._run.ranks
        require_number(ranks.mean(loss), state.global_step + 1, self._run.options)
        self._tokens = int(sum(ranks.numbers(tokens)))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """All ranks end if SIGTERM has come to one."""
        if self._run.ends_now():
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Keeps the metrics of each step and of each evaluation."""
        logs: dict[str, Any] = given["logs"]
        run, step = self._run, state.global_step
        said = {name: value for name, value in logs.items() if not name.startswith("hetero/")}
        if "eval_loss" in logs:
            run.record.eval_losses.append((step, logs["eval_loss"]))
            if run.ranks.leads:
                print(f"step {step}  evaluation loss {logs['eval_loss']:.4f}", file=sys.stderr)
            run.folder.append_metrics({"step": step, **said})
        if "loss" not in logs:
            return
        state.log_history.pop()  # or each checkpoint has the figures of all steps
        norm, lr = logs.get("grad_norm"), logs["learning_rate"]
        point = run.recorder.end_step(logs["loss"], self._tokens, step, norm, lr)
        run.step(point, **said)

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Leaves the time that it took out of the next step."""
        self._run.recorder.begin_step()

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Notes the checkpoint, and leaves its time out of the next step."""
        name = f"checkpoint-{state.global_step}"
        self._run.record.checkpoint = str(self._run.folder.path / CHECKPOINTS_NAME / name)
        self._run.recorder.begin_step()


def make_trainer(
    options: FinetuneOptions,
    folder: RunFolder,
    built: BuiltModel,
    tokenizer: Any,
    data: tuple[Dataset, Dataset | None],
    about: dict[str, Any],
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
    )
    trainer.remove_callback(PrinterCallback)
    if stops:
        trainer.add_callback(EarlyStoppingCallback(stops))
    return trainer
