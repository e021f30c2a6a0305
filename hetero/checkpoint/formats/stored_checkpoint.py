"""A checkpoint in some format: what it has, as a hetero manifest says it, and its values by key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hetero.checkpoint.manifest import Manifest, ParamRecord, TensorRecord
from hetero.checkpoint.model_tensors import master_key

PART_NUMEL = 1 << 20  # elements that are read and written at a time, where a format allows it


class StoredCheckpoint(ABC):
    """A checkpoint that is open for reading; close() it.

    Attributes:
        kind: what it is, in words.
        path: its folder or file.
        manifest: parameters, buffers, optimizers and all tensors by hetero's keys. Of a format that
            says nothing of them, floating-point tensors are parameters, and others buffers.
        files: bytes of its files, by name.
        notes: what its reader should know of it, in sentences.
    """

    kind = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest
        self.files: Mapping[str, int] = {}
        self.notes: list[str] = []

    @abstractmethod
    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of a tensor, flat, in the dtype that is stored, for the caller.

        Raises CheckpointError or StoreError.
        """

    def parts(self, key: str) -> Iterator[torch.Tensor]:
        """A tensor's elements in order, flat, PART_NUMEL at a time. Raises as read()."""
        numel = self.manifest.tensors[key].numel
        for begin in range(0, numel, PART_NUMEL):
            yield self.read(key, begin, min(begin + PART_NUMEL, numel))

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def manifest_of_values(tensors: Mapping[str, TensorRecord]) -> Manifest:
    """The manifest of tensors by name that no optimizer's state belongs to."""
    floating = [name for name, tensor in tensors.items() if tensor.dtype.is_floating_point]
    return make_manifest(tensors, {name: ParamRecord((), False, 0) for name in floating})


def make_manifest(
    tensors: Mapping[str, TensorRecord],
    params: Mapping[str, ParamRecord],
    optimizers: Iterable[Any] = (),
    states: Mapping[str, TensorRecord] | None = None,
) -> Manifest:
    """A manifest of tensors by name, of which `params` are parameters and the rest buffers.

    `states` are those of optimizer states, by key.
    """
    return Manifest(
        step=max((param.step for param in params.values()), default=0),
        files={},
        tensors={**{master_key(name): t for name, t in tensors.items()}, **(states or {})},
        params=dict(params),
        buffers=[name for name in tensors if name not in params],
        optimizers=tuple(optimizers),
        loss_scale=None,
        ranks=(),
    )
