"""What all optimizers of hetero share: a torch optimizer whose updates an engine makes."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn, overload

import torch

from hetero.api.loaded_state import (
    LARGEST,
    check_state,
    check_torch_arguments,
    check_torch_options,
    group_options,
    in_own_options,
    in_own_state,
    is_from_torch,
    refuse_other_rules,
)
from hetero.api.whole_state import export_states, import_states
from hetero.chunk_groups.update_tasks import number
from hetero.chunks.dtypes import Dtypes, RuleName, check_state_dtype
from hetero.config import Config
from hetero.runtime.engine import Engine
from hetero.runtime.update_schedule import OptimizerView
from offload._native import Hyper
from offload.errors import HeteroError, UnmanagedParameterError
from offload.interrupts import uninterrupted

ParamGroups = Iterable[torch.Tensor] | Iterable[dict[str, Any]]

# Options by what they are, in whichever optimizer: numbers, of which most are 0 or more, and those
# that are True or False. The native kernel takes them under the same names.
_NOT_NEGATIVE = ("lr", "lr_decay", "momentum", "eps", "weight_decay")
_NUMBERS = (*_NOT_NEGATIVE, "dampening")
_FLAGS = ("bias_correction", "adamw_mode", "nesterov")

# Optimizers that initialize() has not connected yet.
unmanaged: weakref.WeakSet[HybridOptimizer] = weakref.WeakSet()


class HybridOptimizer(torch.optim.Optimizer):
    """Updates parameters that an engine manages, where their optimizer states live, in fp32.

    A true torch.optim.Optimizer: param groups, LR schedulers, zero_grad and state_dict work. A
    subclass names a rule of the native kernel and says what its options mean;
    native/update/kernels/update_rules.inl.h has the formulas. hetero.initialize() connects it to
    the model.
    """

    rule: ClassVar[RuleName]
    # As in state_dict(), in the order of the optimizer state.
    state_names: ClassVar[tuple[str, ...]]
    device_updates: ClassVar[bool] = True  # of what is at home on DEVICE
    decoupled: ClassVar[bool] = False  # weight decay, where no option says it

    def __init__(
        self,
        params: ParamGroups,
        defaults: dict[str, Any],
        state_dtype: str,
        torch_options: Mapping[str, Any] | None = None,
    ) -> None:
        """`torch_options`: further arguments of torch's optimizers, which have no effect."""
        check_torch_arguments(type(self).__name__, torch_options or {})
        self._engine: Engine | None = None
        # A state dict that was loaded before initialize(), whose options are in use already.
        self._early_state: dict[str, Any] | None = None
        self.state_dtype = check_state_dtype(state_dtype)
        super().__init__(params, defaults)
        unmanaged.add(self)

    def check_options(self, options: Mapping[str, Any], where: str = "") -> None:
        """Raises ValueError if an option of a param group is out of range; `where` says whose."""
        check_torch_options(options, where)
        for name in self._own(_FLAGS):
            if not isinstance(options[name], bool):
                raise ValueError(f"{where}{name} must be True or False, not {options[name]!r}")
        for name in self._own(_NOT_NEGATIVE):
            value = number(options[name])
            if value is None or not 0 <= value <= LARGEST:
                raise ValueError(
                    f"{where}{name} must be a finite number, 0 or more, not {options[name]!r} "
                    f"(updates are computed in fp32, up to {LARGEST:.4g})"
                )
        if "betas" in self.defaults:
            betas = options["betas"]
            pair = isinstance(betas, (tuple, list)) and len(betas) == 2
            values = [number(beta) for beta in betas] if pair else [None]
            if not all(beta is not None and 0 <= beta < 1 for beta in values):
                raise ValueError(f"{where}betas must be two numbers in [0, 1), not {betas!r}")

    def _own(self, names: Sequence[str]) -> list[str]:
        """Those of the options that this optimizer has."""
        return [name for name in names if name in self.defaults]

    def _lr_scale(self, options: Mapping[str, Any], shape: torch.Size) -> float:
        """The factor of the learning rate of parameters of this shape."""
        return 1.0

    def _finish_state(self, kept: dict[str, Any]) -> None:
        """Makes a parameter's state what state_dict() gives of it."""

    def _hyper(
        self, options: Mapping[str, Any], step: int, grad_scale: float, lr_scale: float
    ) -> Hyper:
        """The native kernel's arguments for a param group's update number `step`, from 1.

        Kept gradients are multiplied by `grad_scale`, and `lr` by `lr_scale`. Raises ValueError for
        options that the user has set out of range since.
        """
        self.check_options(options)
        given: dict[str, Any] = {name: float(options[name]) for name in self._own(_NUMBERS)}
        given |= {name: options[name] for name in self._own(_FLAGS)}
        given["decoupled"] = given.pop("adamw_mode", self.decoupled)
        # (Without momentum Muon's average is the gradient, whichever it is.)
        given["nesterov"] = given.get("nesterov", False) and given["momentum"] > 0
        if "betas" in self.defaults:
            given["beta1"], given["beta2"] = map(float, options["betas"])
        return Hyper(step=step, grad_scale=grad_scale, lr_scale=lr_scale, **given)

    def dtypes(self, config: Config) -> Dtypes:
        """The dtypes of `config` and of this optimizer's state.

        Raises:
            ValueError: the policy keeps all state on DEVICE, where this optimizer cannot update it.
        """
        if config.placement_policy == "cuda" and not self.device_updates:
            raise ValueError(
                f"placement_policy='cuda' updates all parameters on DEVICE, and "
                f"{type(self).__name__} updates on the CPU; use HybridAdam, or another policy"
            )
        return replace(
            config.dtypes,
            rule=self.rule,
            state=self.state_dtype,
            device_updates=self.device_updates,
        )

    @uninterrupted
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; after initialize() of frozen parameters, or of modules added since.

        Parameters that need gradients get optimizer state at once, from what the budgets have left
        (Config.reserve_memory keeps some). Frozen ones keep their values and start with zero
        moments; new ones are converted to the compute dtype. With several ranks all must add the
        same parameters, and new ones get the first rank's values.

        Args:
            param_group: "params", and options that differ from the defaults.

        Raises:
            ValueError: a parameter is not the model's, or an option is out of range.
            BudgetError: there is no room; the message has the smallest budget that works.
            HeteroError: another rank could not add the group. Nothing is added in any case.
        """
        self.check_options({**self.defaults, **param_group})
        own = in_own_options(param_group, self.defaults)
        param_group.clear()  # the caller's own dict, which torch keeps, too
        param_group.update(own)
        super().add_param_group(param_group)
        if self._engine is None:
            return
        try:
            self._engine.check_usable()
            self._engine.steps.added_params.admit(self.param_groups[-1]["params"])
        except BaseException:
            self.param_groups.pop()
            raise

    @property
    def option_names(self) -> list[str]:
        """Of its own options; torch's load_state_dict() adds one to the defaults."""
        return sorted(set(self.defaults) - {"differentiable"})

    def connect(self, engine: Engine, view: OptimizerView) -> None:
        """Called by initialize(): from now on `engine`, which has this `view`, keeps the state."""
        self._engine, self._view = engine, view
        unmanaged.discard(self)
        if self._early_state is not None:
            state, self._early_state = self._early_state, None
            options = [dict(group) for group in self.param_groups]  # a scheduler may have set some
            self.load_state_dict(state)
            for group, own in zip(self.param_groups, options, strict=True):
                group.update(own)

    def view(self, config: Config) -> OptimizerView:
        """What an engine sees of this optimizer, without keeping it alive."""
        this = weakref.ref(self)

        def param_groups() -> list[dict[str, Any]]:
            optimizer = this()
            return [] if optimizer is None else optimizer.param_groups

        def hyper_of(*about: Any) -> Hyper:
            optimizer = this()
            assert optimizer is not None  # it has param groups
            return optimizer._hyper(*about)

        def lr_scale_of(options: dict[str, Any], shape: torch.Size) -> float:
            optimizer = this()
            return 1.0 if optimizer is None else optimizer._lr_scale(options, shape)

        return OptimizerView(
            self.dtypes(config), param_groups, hyper_of, lr_scale_of, self.option_names
        )

    @property
    def engine(self) -> Engine:
        """The engine that initialize() made. Raises UnmanagedParameterError before that."""
        if self._engine is None:
            params = self._all_params()
            raise UnmanagedParameterError(
                f"{type(self).__name__} has {len(params)} parameters that are not managed (the "
                f"first: shape {tuple(params[0].shape)}); call "
                f"model, optimizer = hetero.initialize(model, optimizer) first"
            )
        return self._engine

    @property
    def state(self) -> KeptState:
        """Says where the state is; state_dict() and load_state_dict() read and change it."""
        return KeptState()

    @state.setter
    def state(self, value: object) -> None:
        """torch assigns an empty one."""

    def __getstate__(self) -> dict[str, Any]:
        if self._engine is not None:
            raise HeteroError(
                f"{type(self).__name__} of a managed model cannot be copied or pickled; copy its "
                f"state_dict(), and load that into another one"
            )
        own: dict[str, Any] = {"state": {}, "_engine": None, "state_dtype": self.state_dtype}
        return {**super().__getstate__(), **own}

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Calls loss.backward(), with the loss times the loss scale under fp16.

        Under fp16 it must be used instead of loss.backward(), unless the user scales the loss
        (initial_loss_scale=None). For other dtypes the two are the same.

        Args:
            loss: a scalar.
            **options: as of torch.Tensor.backward().
        """
        self.engine.backward(loss, **options)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient.

        Under fp16 a step whose gradients overflow is skipped and changes only the loss scale (of
        hetero; torch.amp.GradScaler does the same by not calling this).

        Unless overlap_updates is "none" or "backward" it returns while updates go on, and whoever
        needs a parameter waits for that one. Unless it is "none" or "forward" backward may have
        made some of the updates already.

        Raises NonFiniteError for gradients that were clipped by a norm that is NaN.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @uninterrupted  # outside of no_grad(), which would stay if its end were interrupted
    @torch.no_grad()
    def _step(self) -> None:
        engine = self.engine  # or the error that there is none
        engine.step(self._view)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as torch.nn.Module.zero_grad() does.

        Args:
            set_to_none: `.grad` becomes None (default), and a parameter that gets no gradient
                afterwards is not updated; False: it becomes zero, and such a parameter is updated
                with zeros.

        """
        if self._engine is not None:
            self._engine.steps.schedule.revoke_all()
        for param in self._all_params():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @uninterrupted
    def state_dict(self) -> dict[str, Any]:
        """Copies the optimizer's state. Any rank may call it alone.

        Returns:
            as torch's: for each trained parameter "step", the rule's states and "master", all in
            fp32, whole, in the parameter's shape. They are in RAM that no budget counts, 4 bytes
            per element each. Before initialize() there is no state, but for one that was loaded.
        """
        state = super().state_dict()
        if self._engine is None:
            return (
                state
                if self._early_state is None
                else state | {"state": self._early_state["state"]}
            )
        params = self._all_params()
        states = export_states(self.engine, params, self.state_names)
        for kept in states.values():
            self._finish_state(kept)
        state["state"] = {i: states[p] for i, p in enumerate(params) if p in states}
        return state

    @uninterrupted
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces masters, parameters and the rule's states. All ranks must call it.

        States that this optimizer keeps in bf16 are rounded to nearest, which is exact for what
        such an optimizer gave. (HybridLion's, HybridSGD's and HybridMuon's lose their lowest bit
        with bf16 parameters.)

        The state of torch.optim.AdamW, Adam, Adagrad, SGD or Muon is taken in, too. Masters stay:
        load the model's fp32 values beside it. (Masters that an optimizer of hetero gave to torch's
        are as old as that.) Options that torch does not have stay. A parameter without a state in
        it begins anew, as with torch's.

        Before initialize() options are taken over, and the states are kept, to be loaded by that.

        Args:
            state_dict: as state_dict() gives it.

        Raises:
            ValueError: it does not fit this optimizer, or has values that no training gives, such
                as NaN or a negative exp_avg_sq. Nothing is changed.
        """
        groups = self.options_of(state_dict["param_groups"])
        if self._engine is None:
            super().load_state_dict({"state": {}, "param_groups": groups})
            self._early_state = state_dict if state_dict["state"] else None
            return
        self.engine.check_usable()
        self.engine.steps.added_params.take_in_unfrozen()
        from_torch = is_from_torch(state_dict["param_groups"])
        states = {
            param: in_own_state(state, param, self.state_names, from_torch)
            for param, state in _states_by_param(state_dict, self._all_params()).items()
        }
        for param, state in states.items():
            check_state(self.engine.find(param), state, self.state_names, type(self).__name__)
        for m in self.engine.find_all(self._all_params()):
            if m.step and m.param not in states:
                zeros = torch.zeros((), device="cpu").expand(m.param.shape)
                states[m.param] = {"step": 0, **dict.fromkeys(self.state_names, zeros)}
        self.engine.steps.schedule.revoke_all()
        super().load_state_dict({"state": {}, "param_groups": groups})
        import_states(self.engine, states, self.state_names)

    def options_of(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """This optimizer's options from param groups of a state, its own or of torch's optimizers.

        Raises ValueError unless they fit. torch's own load_state_dict() would refuse other counts
        and lengths too, but in other words.
        """
        refuse_other_rules(groups)
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} param groups, and this optimizer has "
                f"{len(self.param_groups)}"
            )
        fitting = []
        for index, (group, own) in enumerate(zip(groups, self.param_groups, strict=True)):
            if len(group["params"]) != len(own["params"]):
                raise ValueError(
                    f"param group {index} of the state has {len(group['params'])} parameters, and "
                    f"this optimizer's has {len(own['params'])}"
                )
            name = f"param group {index} of the state"
            fitting.append(group_options(group, own, self.option_names, name, type(self).__name__))
            self.check_options(fitting[-1], f"in {name} ")
        return fitting


class KeptState(defaultdict[Any, Any]):
    """An empty dict that says where the state is to whoever looks a parameter up, or changes it.

    It is true, because there is a state: torch.distributed.checkpoint would make a step with zeros
    to bring about the state of an optimizer that has none.
    """

    def __init__(self) -> None:
        super().__init__(dict)

    def __bool__(self) -> bool:
        return True

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise HeteroError(
            "optimizer.state has no tensors, because the state is kept in chunks; read it in "
            "optimizer.state_dict()['state'], and change it with optimizer.load_state_dict()"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = _refuse
    get = pop = popitem = setdefault = update = clear = _refuse


def _states_by_param(
    state_dict: Mapping[str, Any], params: Sequence[torch.Tensor]
) -> dict[torch.Tensor, Any]:
    """The states by parameter: the state's groups name theirs, in the order of `params`.

    The names are numbers, or those of the model (torch.distributed.checkpoint's functions).
    """
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    of = dict(zip(names, params, strict=False))
    for name in state_dict["state"]:
        if name not in of:
            raise ValueError(
                f"the state has one of parameter {name!r}, and this optimizer has "
                f"{len(params)} parameters, which the state calls "
                f"{', '.join(map(str, names[:3]))}{', ...' if len(names) > 3 else ''}"
            )
    # (torch also updates parameters without elements.)
    return {of[name]: state for name, state in state_dict["state"].items() if of[name].numel()}
