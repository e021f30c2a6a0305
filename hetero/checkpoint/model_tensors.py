"""What a checkpoint keeps of a model and its optimizers: tensors by name, whatever the chunks.

Keys are "model/NAME" for the fp32 master of a trained parameter, the value of a frozen one and
buffers; "optimizer/NAME/STATE" for a state of the rule; "data/RANK/NUMBER" for what a rank alone
has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.api.optimizers import (
    HybridAdagrad,
    HybridAdam,
    HybridLion,
    HybridMuon,
    HybridSGD,
)
from hetero.checkpoint.manifest import GroupRecord, OptimizerRecord, ParamRecord, TensorRecord
from hetero.checkpoint.plain_data import STORED_DTYPES, pack
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam


def master_key(name: str) -> str:
    """Of a parameter's master or value, or of a buffer."""
    return f"model/{name}"


def state_key(name: str, state: str) -> str:
    """Of a state of the rule."""
    return f"optimizer/{name}/{state}"


def data_key(rank: int, number: int) -> str:
    """Of a tensor that a rank alone has."""
    return f"data/{rank}/{number}"


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of an engine's model, by their first names in it.

    Attributes:
        params: the managed parameters, in the order of chunks.
        aliases: of these, their other names.
        plain: buffers that state_dict() has, and parameters that are not managed.
        names: of all parameters, by their id().
    """

    params: dict[str, ManagedParam]
    aliases: dict[str, tuple[str, ...]]
    plain: dict[str, torch.Tensor]
    names: dict[int, str]

    @classmethod
    def of(cls, engine: Engine) -> ModelTensors:
        """Those of an engine's model now."""
        names: dict[int, list[str]] = {}
        plain: dict[str, torch.Tensor] = {}
        for name, param in engine.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
            if engine.params.known(param) is None:
                plain[name] = param.detach()
        for prefix, module in engine.model.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    plain[f"{prefix}.{name}" if prefix else name] = buffer.detach()
        params, aliases = {}, {}
        for chunk_group in engine.chunk_groups:
            for m in chunk_group.members:
                if engine.params.known(m.param) is m and id(m.param) in names:
                    first, *others = names[id(m.param)]
                    params[first], aliases[first] = m, tuple(others)
        return cls(params, aliases, plain, {key: found[0] for key, found in names.items()})

    def own_chunks(self, engine: Engine) -> list[dict[ManagedParam, str]]:
        """The managed parameters, and their names, by chunk, of the chunks that this rank saves.

        Of replicas, which have the same shards, each saves some.
        """
        by_chunk: dict[tuple[int, int], dict[ManagedParam, str]] = {}
        for name, m in self.params.items():
            by_chunk.setdefault((m.chunk.group_index, m.chunk.id), {})[m] = name
        replicas = engine.world.replicas
        count, mine = (1, 0) if replicas is None else (replicas.size, replicas.rank)
        return [chunk for number, chunk in enumerate(by_chunk.values()) if number % count == mine]

    def param_records(self) -> dict[str, ParamRecord]:
        """What a manifest says of the managed parameters."""
        return {
            name: ParamRecord(self.aliases[name], m.chunk.trainable, m.step)
            for name, m in self.params.items()
        }


@dataclass(frozen=True)
class StoredParam:
    """What a checkpoint has of a parameter: keys and dtypes, the master's (or value's) first."""

    keys: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]


def stored_param(engine: Engine, name: str, managed: ManagedParam) -> StoredParam:
    """What is stored of a parameter: of a trained one the master and its rule's states.

    States are stored in the dtype that keeps them; those of 8 bits decoded, in fp32.
    """
    dtypes = engine.params.group(managed.chunk).dtypes
    if not managed.chunk.trainable:
        return StoredParam((master_key(name),), (dtypes.torch_compute,))
    states = STATE_NAMES[dtypes.rule]
    kept = torch.bfloat16 if dtypes.state == "bf16" else torch.float32
    return StoredParam(
        (master_key(name), *(state_key(name, state) for state in states)),
        (torch.float32, *(kept for _ in states)),
    )


# The states of each rule, in the order of the optimizer state.
STATE_NAMES = {
    each.rule: each.state_names
    for each in (HybridAdam, HybridLion, HybridAdagrad, HybridSGD, HybridMuon)
}


def tensor_records(engine: Engine, model: ModelTensors) -> dict[str, TensorRecord]:
    """What a manifest says of the model's tensors and the optimizers'.

    Raises ValueError for buffers of a dtype that data files cannot have.
    """
    records: dict[str, TensorRecord] = {}
    for name, m in model.params.items():
        stored = stored_param(engine, name, m)
        for key, dtype in zip(stored.keys, stored.dtypes, strict=True):
            records[key] = TensorRecord(tuple(m.param.shape), dtype)
    for name, tensor in model.plain.items():
        if tensor.dtype not in STORED_DTYPES:
            raise ValueError(f"{name} is of {tensor.dtype}, which safetensors files do not have")
        records[master_key(name)] = TensorRecord(tuple(tensor.shape), tensor.dtype)
    return records


def optimizer_records(
    optimizers: Sequence[HybridOptimizer], names: dict[int, str], tensors: list[torch.Tensor]
) -> tuple[OptimizerRecord, ...]:
    """What a manifest says of the optimizers; options that are tensors go to `tensors`.

    `names`: of parameters, by their id(). Raises ValueError for options that are no plain data.
    """
    return tuple(
        OptimizerRecord(
            type(optimizer).__name__,
            tuple(optimizer.state_names),
            optimizer.state_dtype,
            tuple(_group_records(optimizer, names, tensors)),
        )
        for optimizer in optimizers
    )


def _group_records(
    optimizer: HybridOptimizer, names: dict[int, str], tensors: list[torch.Tensor]
) -> Iterator[GroupRecord]:
    for number, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        packed = pack(options, f"param group {number}", tensors)
        yield GroupRecord(packed, tuple(names[id(p)] for p in group["params"] if id(p) in names))
