"""The optimizers that users make: their options, and the native kernel's arguments from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch

from hetero.api.loaded_state import LARGEST, MOMENTUM_SUM, momentum_sum
from hetero.api.optimizer import HybridOptimizer, ParamGroups
from hetero.chunk_groups.update_tasks import number


class HybridAdam(HybridOptimizer):
    """AdamW, or Adam, by one name: the rule of AdamW and Adam, which have torch's defaults.

    Parameters with their home on a device are updated there, with the same bits as by the CPU.

    Args:
        params: parameters, or param groups with options of their own.
        lr: learning rate, 0 or more.
        betas: decay of the averages of the gradient and of its square, in [0, 1).
        eps: added to the square root of exp_avg_sq, 0 or more.
        weight_decay: 0 (default) or more.
        bias_correction: divide both averages by one minus their beta to the power of the step.
        adamw_mode: True: weight decay is decoupled from the gradient (AdamW); False: it is added to
            the gradient (Adam).
        state_dtype: "fp32" (default), or, rounded stochastically, the same way in every run,
            "bf16": both states take half the memory and traffic; or "8bit": little more than a
            quarter, 1.06 bytes an element each. Blocks of 64 elements have a scale of their own, as
            in block-wise 8-bit optimizers (Dettmers et al., 2021), and codes are 8-bit floats, of
            the square root where a state is never negative (docs/formats.md). It costs compute:
            such an update is bound by arithmetic, not by memory.
        torch_options: torch's further arguments. foreach, fused and capturable have no effect: one
            kernel takes many tensors at a time.

    Raises:
        ValueError: an option is out of range, or of another update: amsgrad, maximize,
            differentiable.
    """

    rule = "adam"
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adamw_mode: bool = True,
        state_dtype: str = "fp32",
        **torch_options: Any,
    ) -> None:
        own = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        own |= {"weight_decay": weight_decay, "adamw_mode": adamw_mode}
        super().__init__(params, own, state_dtype, torch_options)


class Adam(HybridAdam):
    """Adam, as torch.optim.Adam, with the states exp_avg and exp_avg_sq.

    Args:
        params, lr, betas, eps: as of HybridAdam.
        weight_decay: added to the gradient, 0 (default) or more.
        amsgrad: False.
        decoupled_weight_decay: True makes it AdamW.
        options: bias_correction, state_dtype and torch_options, as of HybridAdam.

    Raises:
        ValueError: as HybridAdam.
    """

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **options: Any,
    ) -> None:
        options = {"adamw_mode": decoupled_weight_decay, "amsgrad": amsgrad, **options}
        super().__init__(params, lr, betas, eps, weight_decay, **options)


class AdamW(HybridAdam):
    """AdamW, as torch.optim.AdamW, with the states exp_avg and exp_avg_sq.

    Args:
        params, lr, betas, eps: as of HybridAdam.
        weight_decay: decoupled from the gradient, 0.01 (default), 0 or more.
        amsgrad: False.
        options: bias_correction, state_dtype and torch_options, as of HybridAdam.

    Raises:
        ValueError: as HybridAdam.
    """

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad=amsgrad, **options)


class CPUAdam(HybridAdam):
    """HybridAdam whose updates run on the CPU whatever the compute device.

    No trained parameter has its home on a device: optimizer state stays in RAM and on NVMe.
    """

    device_updates = False


class HybridLion(HybridOptimizer):
    """Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023), state: exp_avg.

    With bf16 parameters exp_avg has one bit of precision less, because the master takes it
    (docs/formats.md).

    Args:
        params: parameters, or param groups with options of their own.
        lr: learning rate, 0 or more; usually 3 to 10 times smaller than Adam's.
        betas: weight of exp_avg in the update, and its decay, in [0, 1).
        weight_decay: decoupled from the gradient, 0 or more.
        state_dtype: as of HybridAdam.

    Raises:
        ValueError: an option is out of range.
    """

    rule = "lion"
    state_names = ("exp_avg",)
    decoupled = True

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        state_dtype: str = "fp32",
    ) -> None:
        own = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, own, state_dtype)


class HybridAdagrad(HybridOptimizer):
    """Adagrad, as torch.optim.Adagrad, with the state sum.

    Args:
        params: parameters, or param groups with options of their own.
        lr: learning rate, 0 or more.
        lr_decay: the learning rate is divided by 1 + (step - 1) * lr_decay.
        weight_decay: added to the gradient, 0 or more.
        initial_accumulator_value: 0, with which sum begins.
        eps: added to the square root of sum, 0 or more.
        foreach: no effect.
        state_dtype, torch_options: as of HybridAdam.

    Raises:
        ValueError: an option is out of range, or of another update: maximize, differentiable.
    """

    rule = "adagrad"
    state_names = ("sum",)

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        state_dtype: str = "fp32",
        **torch_options: Any,
    ) -> None:
        own = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        torch_options["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(params, own, state_dtype, torch_options)


class HybridSGD(HybridOptimizer):
    """SGD with momentum, as torch.optim.SGD, with the state momentum_buffer.

    A parameter's first update makes its gradient the buffer, without dampening. Every parameter has
    a buffer, which stays as it is while momentum is 0: plain SGD works, and its buffers take memory
    that nothing uses. Momentum that is switched on after updates without it begins with a buffer of
    zeros, and its dampening counts at once (torch's only from the second update on). With bf16
    parameters the buffer has one bit of precision less, because the master takes it
    (docs/formats.md). state_dict() has no buffer of a parameter that was never updated, as torch's.

    Args:
        params: parameters, or param groups with options of their own.
        lr: learning rate, 0 or more.
        momentum: factor of the buffer before the gradient is added to it, 0 (default) or more.
        dampening: the gradient is added to the buffer times 1 - dampening.
        weight_decay: added to the gradient, 0 or more.
        nesterov: move along the gradient plus momentum times the buffer, instead of the buffer;
            needs momentum, and no dampening.
        state_dtype, torch_options: as of HybridAdam.

    Raises:
        ValueError: an option is out of range, or of another update: maximize, differentiable.
    """

    rule = "sgd"
    state_names = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        state_dtype: str = "fp32",
        **torch_options: Any,
    ) -> None:
        own = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        super().__init__(params, own | {"weight_decay": weight_decay}, state_dtype, torch_options)

    def check_options(self, options: Mapping[str, Any], where: str = "") -> None:
        super().check_options(options, where)
        momentum, given, nesterov = (options[n] for n in ("momentum", "dampening", "nesterov"))
        dampening = number(given)
        if dampening is None or not abs(dampening) <= LARGEST:
            raise ValueError(f"{where}dampening must be a finite number, not {given!r}")
        if nesterov and not (momentum > 0 and dampening == 0):
            raise ValueError(
                f"{where}nesterov needs momentum and no dampening, and momentum is {momentum!r} "
                f"and dampening {given!r}"
            )

    def _finish_state(self, kept: dict[str, Any]) -> None:
        if kept["step"] == 0:  # as torch.optim.SGD's of a parameter that was never updated
            del kept["momentum_buffer"]


class HybridMuon(HybridOptimizer):
    """Muon, as torch.optim.Muon, for the matrices of hidden layers, with the state momentum_buffer.

    Give it parameters of two dimensions, and all others (embeddings, heads, norms, biases) to an
    optimizer of their own: hetero.initialize(model, [muon, adam]). Each matrix's momentum is
    orthogonalised by products in bf16 where compute happens; the rest of the update runs where the
    state lives. With several ranks each matrix has one that makes its products.

    Outside of all budgets step() takes 2 bytes per element of one chunk, and about 10 per element
    of one matrix for its products; with several ranks also those that are on their way between
    them, up to 12 bytes per element of one chunk over the number of ranks. The products' bits are
    those of one kind of machine, so replicas (hybrid sharding) must run on like ones. With bf16
    parameters momentum_buffer has one bit of precision less, because the master takes it
    (docs/formats.md). state_dict() has the sum of each momentum as well, momentum_sum.

    Args:
        params: parameters, or param groups with options of their own.
        lr: learning rate, 0 or more.
        weight_decay: decoupled from the gradient, 0 or more; times lr, without `adjust_lr_fn`.
        momentum: weight of the momentum that was before in the average with the gradient, from 0
            to 1.
        nesterov: move along the average of the gradient and the new momentum, instead of this.
        ns_coefficients: a, b, c of the polynomial a x + b x^3 + c x^5 that brings each singular
            value of a matrix near to 1.
        eps: the smallest norm by which a matrix is divided before that, more than 0.
        ns_steps: how often the polynomial is applied, from 1 to 99.
        adjust_lr_fn: lr of a matrix of A rows and B columns is multiplied by sqrt(max(1, A / B))
            ("original", or None) or by 0.2 sqrt(max(A, B)) ("match_rms_adamw": the learning rate
            and weight decay of AdamW can be used).
        state_dtype: as of HybridAdam.

    Raises:
        ValueError: an option is out of range, or a parameter has not two dimensions.
    """

    rule = "muon"
    state_names = ("momentum_buffer",)
    decoupled = True

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        state_dtype: str = "fp32",
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        products = {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps}
        given = {**own, **products, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, given, state_dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of HybridOptimizer; raises ValueError for what is no matrix, too."""
        given = param_group["params"]
        if not isinstance(given, (torch.Tensor, set)):  # torch refuses a set
            given = list(given)
        for entry in [given] if isinstance(given, torch.Tensor) else given:
            param = entry[1] if isinstance(entry, tuple) else entry  # named_parameters()
            if isinstance(param, torch.Tensor) and param.ndim != 2:
                raise ValueError(
                    f"HybridMuon updates matrices, and got a parameter of shape "
                    f"{tuple(param.shape)}; give it to another optimizer, for example AdamW: "
                    f"hetero.initialize(model, [muon, adam])"
                )
        super().add_param_group({**param_group, "params": given})

    def check_options(self, options: Mapping[str, Any], where: str = "") -> None:
        super().check_options(options, where)
        momentum, eps, steps = (options[n] for n in ("momentum", "eps", "ns_steps"))
        if momentum > 1:
            raise ValueError(f"{where}momentum must be from 0 to 1, not {momentum!r}")
        if not eps > 0:
            raise ValueError(f"{where}eps must be more than 0, not {eps!r}")
        if isinstance(steps, bool) or not isinstance(steps, Integral) or not 1 <= int(steps) <= 99:
            raise ValueError(f"{where}ns_steps must be a whole number from 1 to 99, not {steps!r}")
        given = options["ns_coefficients"]
        three = isinstance(given, (tuple, list)) and len(given) == 3
        values = [number(value) for value in given] if three else [None]
        if not all(value is not None and math.isfinite(value) for value in values):
            raise ValueError(f"{where}ns_coefficients must be three finite numbers, not {given!r}")
        if options["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"{where}adjust_lr_fn must be None, 'original' or 'match_rms_adamw', not "
                f"{options['adjust_lr_fn']!r}"
            )

    def _lr_scale(self, options: Mapping[str, Any], shape: torch.Size) -> float:
        rows, columns = shape
        if options["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / max(1, columns)))

    def _finish_state(self, kept: dict[str, Any]) -> None:
        # By it load_state_dict() sees that torch.optim.Muon has trained on with the state, and that
        # its master is older than the parameter.
        kept[MOMENTUM_SUM] = momentum_sum(kept["momentum_buffer"])
