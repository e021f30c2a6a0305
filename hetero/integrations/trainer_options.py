"""What a Trainer's arguments mean with hetero: which optimizer they name, and which cannot work."""

from __future__ import annotations

from typing import Any

from hetero.api.optimizer import HybridOptimizer
from hetero.api.optimizers import HybridAdagrad, HybridAdam, HybridLion, HybridSGD
from hetero.config import Config

# TrainingArguments.optim, and the state_dtype of the optimizer that it becomes. What is "paged" in
# bitsandbytes is what hetero does with all state.
_ADAM = {
    "adamw_torch": "fp32",
    "adamw_torch_fused": "fp32",
    "paged_adamw_32bit": "fp32",
    "adamw_8bit": "8bit",
    "adamw_bnb_8bit": "8bit",
    "adamw_torch_8bit": "8bit",
    "paged_adamw_8bit": "8bit",
}
_LION = {
    "lion_32bit": "fp32",
    "paged_lion_32bit": "fp32",
    "lion_8bit": "8bit",
    "paged_lion_8bit": "8bit",
}
_OTHERS: dict[str, type[HybridOptimizer]] = {"adagrad": HybridAdagrad, "sgd": HybridSGD}
KNOWN_OPTIMIZERS = (*_ADAM, *_LION, *_OTHERS)


def optimizer_of(arguments: Any) -> tuple[type[HybridOptimizer], dict[str, Any]]:
    """The optimizer that TrainingArguments name, as a class and the options that it takes.

    Weight decay is not among them: the Trainer gives it with the param groups.

    Raises:
        ValueError: hetero has no such optimizer, or `optim_args` has options of another library's.
    """
    name = getattr(arguments.optim, "value", arguments.optim)
    if name not in KNOWN_OPTIMIZERS:
        raise ValueError(
            f"optim={name!r} is none of hetero's optimizers; give one of "
            f"{', '.join(KNOWN_OPTIMIZERS)}, or optimizer_cls_and_kwargs=(hetero.HybridAdam, "
            f"{{...}}) to the Trainer"
        )
    if arguments.optim_args:
        raise ValueError(
            f"optim_args={arguments.optim_args!r} has options for another library's optimizer; "
            f"give optimizer_cls_and_kwargs=(hetero.HybridAdam, {{...}}) to the Trainer"
        )
    lr = {"lr": arguments.learning_rate}
    betas = {"betas": (arguments.adam_beta1, arguments.adam_beta2)}
    if name in _ADAM:
        eps = {"eps": arguments.adam_epsilon}
        return HybridAdam, {**lr, **betas, **eps, "state_dtype": _ADAM[name]}
    if name in _LION:
        return HybridLion, {**lr, **betas, "state_dtype": _LION[name]}
    return _OTHERS[name], lr


def check_arguments(arguments: Any) -> None:
    """Raises ValueError for TrainingArguments that cannot work together with hetero."""
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        value = getattr(arguments, name, None)
        # (Some versions have an empty list, or False, for what is off.)
        if value:
            raise ValueError(
                f"TrainingArguments.{name} is {value!r}, and hetero shards and offloads the model "
                f"itself; leave {name} out"
            )
    if arguments.n_gpu > 1:
        raise ValueError(
            f"one process sees {arguments.n_gpu} GPUs, for which a Trainer copies the model to "
            f"each of them; start one process per GPU (torchrun --nproc-per-node "
            f"{arguments.n_gpu}), or show it one (CUDA_VISIBLE_DEVICES=0)"
        )


def check_precision(config: Config) -> None:
    """Raises ValueError if the loss has to be scaled by a call that no Trainer makes."""
    if config.dtype == "fp16" and config.initial_loss_scale is not None:
        raise ValueError(
            "dtype='fp16' with hetero's own loss scale needs optimizer.backward(loss), which a "
            "Trainer does not call; give dtype='bf16', or initial_loss_scale=None and "
            "TrainingArguments(fp16=True)"
        )
