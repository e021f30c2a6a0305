"""Hugging Face's Trainer, and what makes a Trainer of any other class train with hetero."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hetero.api.optimizer import HybridOptimizer
from hetero.api.optimizers import HybridAdagrad, HybridAdam, HybridLion, HybridSGD
from hetero.checkpoint.load import load
from hetero.checkpoint.rank_data import random_stays
from hetero.checkpoint.save import save
from hetero.config import Config
from hetero.integrations.accelerator import CHECKPOINT_NAME, Accelerator, plain_optimizer
from hetero.integrations.adapters import adapter_state, has_adapters
from hetero.integrations.exports import export_into
from hetero.integrations.figures import step_figures
from hetero.runtime.engine import Engine
from hetero.setup.initialize import initialize

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


# By TrainingArguments.optim: the optimizer, and its state_dtype if it has a choice. "Paged" state
# is what all state is here.
_OPTIMIZERS: dict[str, tuple[type[HybridOptimizer], str]] = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"), (HybridAdam, "fp32")
    ),
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"),
        (HybridAdam, "8bit"),
    ),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), (HybridLion, "fp32")),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), (HybridLion, "8bit")),
    "adagrad": (HybridAdagrad, ""),
    "sgd": (HybridSGD, ""),
}


class HeteroTrainerMixin(_Base):
    """Makes any Trainer of Hugging Face's train with hetero; TrainingArguments stay as they are.

    `class MyTrainer(HeteroTrainerMixin, SFTTrainer): pass`, for example; `Trainer` below is the
    plain one. The model is built in hetero.ZeroInitContext, or anywhere, with `hetero_config` then.

    - `optim`, `learning_rate` and the like name the optimizer, as ever, and hetero's takes its
      place. `optimizer_cls_and_kwargs` and `optimizers` may have one of hetero's.
    - A checkpoint (`save_steps`, `save_strategy`) has the model as from_pretrained() reads it, and
      in its folder `hetero` what training goes on from, written in pieces. With adapters it has
      these, as peft reads them. `resume_from_checkpoint` goes on from it with the same bits, and
      `load_best_model_at_end` loads its masters. Checkpoints of a plain Trainer load, too.
    - Accumulation, clipping, evaluation, schedulers, callbacks and autocast are the Trainer's own.
    - Several ranks (torchrun) shard the model by hetero, without DistributedDataParallel.
    - Every log has what engine.traffic and engine.ledger say (`hetero/...`), for TensorBoard,
      W&B and whatever else `report_to` names.

    The engine is open until close(), or the end of the `with` block that the Trainer opens:
    evaluate(), predict() and save_model() work after train().

    Args:
        hetero_config: options as hetero.initialize() takes them, for a model that was not built in
            hetero.ZeroInitContext. Default: none, for one that was.

    Raises:
        ValueError: arguments that cannot work: DeepSpeed or FSDP, an optimizer that hetero has
            not, several GPUs in one process, or fp16 with hetero's own loss scale.
    """

    def __init__(
        self, *args: Any, hetero_config: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        # Which one differs from class to class: the third of DPOTrainer, after its reference model.
        for each in (*args, *kwargs.values()):
            if isinstance(each, transformers.TrainingArguments):
                _check_arguments(each)
        self._hetero_options = dict(hetero_config or {})
        if self._hetero_options:
            _check_precision(Config.make(**self._hetero_options))
        super().__init__(*args, **kwargs)

    # What the library calls before and while it trains

    def create_accelerator_and_postprocess(self) -> None:
        """As the library's, with hetero's Accelerator, of which the library makes the plain one."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Nothing: hetero's backend says where parameters are used."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer of hetero that the arguments name, with the library's param groups."""
        optimizer = super().create_optimizer(*args, **kwargs)
        plain_optimizer(optimizer)
        return optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """What `args` name now: each train() of a Trainer with model_init asks anew."""
        return _optimizer_of(args)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the library's; the first one initializes the model."""
        self.initialize()
        return super().training_step(*args, **kwargs)

    def initialize(self) -> Engine:
        """hetero.initialize(), once: after the library has prepared model and optimizer, as it has
        when callbacks are told that training begins."""
        optimizer = plain_optimizer(self.optimizer)
        if optimizer._engine is None:
            initialize(self._model, optimizer, **self._hetero_options)
            _check_precision(optimizer.engine.config)
        return optimizer.engine

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the library's, with the engine's figures."""
        engine = self.engine
        if engine is not None and "loss" in logs:
            logs = {**logs, **step_figures(engine)}
        super().log(logs, *args, **kwargs)

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the library's. All ranks call it, and save: some versions have one rank do it."""
        if self.engine is None or self.args.should_save:
            super().save_model(output_dir, _internal_call)
        else:
            self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The model's files, as from_pretrained() reads them. All ranks call it."""
        if state_dict is not None or self.engine is None:
            super()._save(output_dir, state_dict)
        elif has_adapters(self._model):
            # (Reading parameters is something that one rank may do alone.)
            if self.args.should_save:
                super()._save(output_dir, adapter_state(self._model))
        else:
            self._export(Path(output_dir or self.args.output_dir or "."))

    def _export(self, folder: Path) -> None:
        export_into(self._model, folder, self.args.should_save)
        if not self.args.should_save:
            return
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """What training goes on from. All ranks call it."""
        engine = self.engine
        assert engine is not None  # a step was made
        place = Path(output_dir) / CHECKPOINT_NAME
        save(place, self._model, self._optimizer, extra=self._checkpoint_extra())

    def _checkpoint_extra(self) -> dict[str, Any]:
        """What a checkpoint has beside model and optimizer, as hetero.save() takes it."""
        return {"scheduler": self.lr_scheduler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing for a checkpoint of hetero: its values come when there is an engine."""
        if not _has_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Model, optimizer and scheduler. All ranks call it.

        Random numbers are the library's business: it draws the order of the samples first, as the
        run that was interrupted did, and loads their state when it has skipped those of before.
        """
        if checkpoint is None or not _has_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self.initialize()
        extra = {"scheduler": self.lr_scheduler}
        with random_stays():
            load(Path(checkpoint) / CHECKPOINT_NAME, self._model, self._optimizer, extra=extra)

    def _load_best_model(self) -> None:
        """The masters of the best checkpoint. All ranks call it."""
        best = self.state.best_model_checkpoint
        if best is not None and _has_checkpoint(best):
            load(Path(best) / CHECKPOINT_NAME, self._model)
        else:
            super()._load_best_model()

    # The engine

    @property
    def _model(self) -> torch.nn.Module:
        assert self.model is not None
        return self.model

    @property
    def _optimizer(self) -> Any:
        return plain_optimizer(self.optimizer)

    @property
    def engine(self) -> Engine | None:
        """The engine; None before the first step."""
        return None if self.optimizer is None else self._optimizer._engine

    def close(self) -> None:
        """Frees the memory and the files of the model state; idempotent. All ranks call it."""
        if self.engine is not None:
            self.engine.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Trainer(HeteroTrainerMixin, transformers.Trainer):
    """transformers.Trainer that trains with hetero; HeteroTrainerMixin says what is different."""


def _has_checkpoint(folder: str) -> bool:
    return (Path(folder) / CHECKPOINT_NAME).is_dir()


def _optimizer_of(arguments: Any) -> tuple[type[HybridOptimizer], dict[str, Any]]:
    """The optimizer that TrainingArguments name, as a class and the options that it takes.

    Weight decay is not among them: the Trainer gives it with the param groups.

    Raises:
        ValueError: hetero has no such optimizer, or `optim_args` has options of another library's.
    """
    name = getattr(arguments.optim, "value", arguments.optim)
    if name not in _OPTIMIZERS:
        raise ValueError(
            f"optim={name!r} is none of hetero's optimizers; give one of "
            f"{', '.join(_OPTIMIZERS)}, or optimizer_cls_and_kwargs=(hetero.HybridAdam, "
            f"{{...}}) to the Trainer"
        )
    if arguments.optim_args:
        raise ValueError(
            f"optim_args={arguments.optim_args!r} has options for another library's optimizer; "
            f"give optimizer_cls_and_kwargs=(hetero.HybridAdam, {{...}}) to the Trainer"
        )
    kind, state_dtype = _OPTIMIZERS[name]
    options: dict[str, Any] = {"lr": arguments.learning_rate}
    if state_dtype:
        options["betas"] = (arguments.adam_beta1, arguments.adam_beta2)
        options["state_dtype"] = state_dtype
    if kind is HybridAdam:
        options["eps"] = arguments.adam_epsilon
    return kind, options


def _check_arguments(arguments: Any) -> None:
    """Raises ValueError for TrainingArguments that cannot work together with hetero."""
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        value = getattr(arguments, name, None)
        # (Some versions have an empty list, or False, for what is off.)
        if value:
            raise ValueError(
                f"TrainingArguments.{name} is {value!r}, and hetero shards and offloads the model "
                f"itself; leave {name} out"
            )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(arguments, name, False):
            raise ValueError(
                f"TrainingArguments.{name} casts the model in evaluate(), and its dtype is "
                f"hetero's; leave {name} out, and give dtype='bf16' to ZeroInitContext or "
                f"hetero_config for masters in fp32"
            )
    if arguments.n_gpu > 1:
        raise ValueError(
            f"one process sees {arguments.n_gpu} GPUs, for which a Trainer copies the model to "
            f"each of them; start one process per GPU (torchrun --nproc-per-node "
            f"{arguments.n_gpu}), or show it one (CUDA_VISIBLE_DEVICES=0)"
        )


def _check_precision(config: Config) -> None:
    """Raises ValueError if the loss has to be scaled by a call that no Trainer makes."""
    if config.dtype == "fp16" and config.initial_loss_scale is not None:
        raise ValueError(
            "dtype='fp16' with hetero's own loss scale needs optimizer.backward(loss), which a "
            "Trainer does not call; give dtype='bf16', or initial_loss_scale=None and "
            "TrainingArguments(fp16=True)"
        )
