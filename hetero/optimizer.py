"""HybridAdam: Adam and AdamW over managed parameters, as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch

from hetero.engine import Engine
from hetero.state import export_states, import_states
from offload.errors import UnmanagedParameterError


class HybridAdam(torch.optim.Optimizer):
    """Adam (adamw_mode=False) or AdamW over parameters that an engine manages.

    A true torch.optim.Optimizer: param groups, LR schedulers, zero_grad and state_dict work. The
    order of operations is documented with the kernel (docs/design.md); the update runs where the
    record lives, in fp32. hetero.initialize() connects it to the model.

    Raises ValueError for hyper-parameters out of range.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
    ) -> None:
        self._engine: Engine | None = None
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw_mode": adamw_mode,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group before initialize(). Later it raises ValueError: the layout is fixed."""
        if self._engine is not None:
            raise ValueError(
                "add_param_group after hetero.initialize(): chunks are laid out already; give all "
                "param groups to the optimizer first"
            )
        merged = {**self.defaults, **param_group}
        beta1, beta2 = merged["betas"]
        if not (merged["lr"] >= 0 and merged["eps"] >= 0 and merged["weight_decay"] >= 0):
            raise ValueError(
                f"lr, eps and weight_decay must not be negative, not lr={merged['lr']}, "
                f"eps={merged['eps']}, weight_decay={merged['weight_decay']}"
            )
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(f"betas must be in [0, 1), not {merged['betas']}")
        super().add_param_group(param_group)

    @property
    def engine(self) -> Engine:
        """The engine that initialize() made. Raises UnmanagedParameterError before that."""
        if self._engine is None:
            params = [p for group in self.param_groups for p in group["params"]]
            raise UnmanagedParameterError(
                f"{type(self).__name__} has {len(params)} parameters that are not managed (the "
                f"first: shape {tuple(params[0].shape)}); call "
                f"model, optimizer = hetero.initialize(model, optimizer) first"
            )
        return self._engine

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """loss.backward(), with the loss scaled under fp16, where it must be used."""
        self.engine.backward(loss, **options)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient.

        Under fp16 a step whose gradients overflow is skipped and changes only the loss scale.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.step(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients. `.grad` becomes None in either mode."""
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None
        if self._engine is not None:
            self._engine.forget_clip()

    def state_dict(self) -> dict[str, Any]:
        """As torch's: for each parameter step, exp_avg, exp_avg_sq and master (all fp32, whole).

        It is in RAM outside the budgets: 12 bytes a parameter.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        states = export_states(self.engine, params)
        state = super().state_dict()
        state["state"] = {i: states[p] for i, p in enumerate(params) if p in states}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() gave. Raises ValueError, with nothing loaded, if it is not."""
        params = [p for group in self.param_groups for p in group["params"]]
        states = {params[i]: state for i, state in state_dict["state"].items() if i < len(params)}
        if len(states) < len(state_dict["state"]):
            raise ValueError(
                f"the state is of {len(state_dict['state'])} parameters, and this optimizer has "
                f"{len(params)}"
            )
        for param, state in states.items():
            name = self.engine.name_of(param)
            for key in ("step", "exp_avg", "exp_avg_sq", "master"):
                if key not in state:
                    raise ValueError(f"the state of {name} has no {key!r}")
                if key != "step" and state[key].shape != param.shape:
                    raise ValueError(
                        f"the state of {name} has {key} of shape {tuple(state[key].shape)}, and "
                        f"the parameter has {tuple(param.shape)}"
                    )
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        import_states(self.engine, states)


class CPUAdam(HybridAdam):
    """HybridAdam whose updates always run on the CPU, whatever the compute device."""
