"""Which of hetero's optimizers goes on with the states that another format has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetero.api.loaded_state import in_own_options, refuse_other_rules
from hetero.api.optimizer import HybridOptimizer
from hetero.api.optimizers import HybridAdagrad, HybridAdam, HybridLion, HybridMuon, HybridSGD
from hetero.checkpoint.manifest import GroupRecord, OptimizerRecord
from hetero.checkpoint.plain_data import pack
from offload.errors import CheckpointError

_OTHERS = ("max_exp_avg_sq", "master", "momentum_sum")


def optimizer_class(options: Mapping[str, Any], states: Iterable[str]) -> type[HybridOptimizer]:
    """The class by the options of a param group and the names of its parameters' states.

    Raises CheckpointError if there is none.
    """
    found = set(states) - {"step", *_OTHERS}
    if found == {"exp_avg", "exp_avg_sq"} or ("betas" in options and not found):
        return HybridAdam
    if found == {"exp_avg"}:
        return HybridLion
    if found == {"sum"}:
        return HybridAdagrad
    if found == {"momentum_buffer"} or not found:
        return HybridMuon if "ns_steps" in options else HybridSGD
    raise CheckpointError(
        f"the checkpoint has the optimizer states {', '.join(sorted(found))}, which no "
        f"optimizer of hetero has"
    )


def optimizer_records(
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[str, Iterable[str]],
    in_own_words: bool = True,
) -> list[OptimizerRecord]:
    """Records of the optimizers that param groups belong to; "params" in these are names.

    Groups of one class that follow one another are one optimizer's. Raises CheckpointError, and
    ValueError for an update that no optimizer here has.

    Args:
        groups: as torch's optimizers have them.
        states: the names of the states of each parameter.
        in_own_words: options that only torch has are left out, those that only hetero has are
            hetero's defaults.
    """
    refuse_other_rules(groups)
    made: list[tuple[type[HybridOptimizer], list[GroupRecord]]] = []
    for number, group in enumerate(groups):
        names = list(group["params"])
        options = {name: value for name, value in group.items() if name != "params"}
        kind = optimizer_class(options, {s for name in names for s in states.get(name, ())})
        if options and in_own_words:
            is_adam = issubclass(kind, HybridAdam)
            defaults = {"bias_correction": True, "adamw_mode": True} if is_adam else {}
            options = in_own_options(options, defaults)
        record = GroupRecord(pack(options, f"param group {number}", []), tuple(names))
        if not made or made[-1][0] is not kind:
            made.append((kind, []))
        made[-1][1].append(record)
    return [
        OptimizerRecord(kind.__name__, tuple(kind.state_names), "fp32", tuple(records))
        for kind, records in made
    ]
