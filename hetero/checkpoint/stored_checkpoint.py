"""A checkpoint in some format: what it has, as a hetero manifest says it, and its values by key."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from hetero.checkpoint.data_writer import Range
from hetero.checkpoint.manifest import (
    Manifest,
    OptimizerRecord,
    ParamRecord,
    TensorRecord,
    data_key,
    master_key,
    name_of,
)
from offload.errors import CheckpointError

PART_NUMEL = 1 << 20  # elements that are read and written at a time, where a format allows it


class StoredCheckpoint:
    """A checkpoint that is open for reading; close() it.

    Attributes:
        kind: what it is, in words.
        path: its folder or file.
        manifest: parameters, buffers, optimizers and all tensors by hetero's keys. Of a format that
            says nothing of them, floating-point tensors are parameters, and others buffers.
        files: bytes of its files, by name.
        notes: what its reader should know of it, in sentences.
        knows_frozen: it says of each parameter whether it was trained.
        may_lack: names of the model that loads it, which keeps what it lacks of them.
        remedy: where it does not fit a model, what to do.
        digest: the same on all ranks if they have the same; "" if all see the same files.
    """

    kind = ""
    knows_frozen = True
    may_lack: Container[str] = ()
    remedy = "Build the model as it was saved"
    digest = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest
        self.files: Mapping[str, int] = {}
        self.notes: list[str] = []

    # A format has one of the next two.

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of a tensor, flat, in the dtype that is stored; not to be changed.

        Raises CheckpointError or StoreError.
        """
        ((_, _, found),) = self.values([[(key, begin, end)]])
        return found

    def values(self, order: Iterable[Sequence[Range]]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Of ranges in this order the key, the first element, and the values, as read() gives them.

        What comes next may be read meanwhile. One such iteration is made at a time.

        Args:
            order: by chunk of the model that loads, so that a format whose own parts are large
                can read what a chunk needs at once.

        Raises as read().
        """
        for key, begin, end in (each for chunk in order for each in chunk):
            yield key, begin, self.read(key, begin, end)

    def open(self) -> None:
        """Opens what read() needs, so that nothing but values can turn out to be damaged later.

        Raises CheckpointError.
        """

    def whole(self, key: str) -> torch.Tensor:
        """A tensor in its shape. Raises as read()."""
        record = self.manifest.tensors[key]
        return self.read(key, 0, record.numel).view(record.shape)

    def own_tensor(self, rank: int, number: int) -> torch.Tensor:
        """Tensor `number` of those that a rank alone had. Raises CheckpointError."""
        key = data_key(rank, number)
        if key not in self.manifest.tensors:
            raise CheckpointError(f"the checkpoint has no tensor {key!r}")
        return self.whole(key)

    def optimizers_of(self, groups: Sequence[Sequence[Sequence[str]]]) -> Sequence[OptimizerRecord]:
        """The optimizers, for a model whose optimizers' param groups have parameters of these
        names. Raises ValueError if a format that keeps options in another way does not fit."""
        return self.manifest.optimizers

    def parts(self, key: str) -> Iterator[torch.Tensor]:
        """A tensor's elements in order, flat, PART_NUMEL at a time. Raises as read()."""
        for _, begin, end in self._ranges_of(key):
            yield self.read(key, begin, end)

    def _ranges_of(self, key: str) -> Iterator[Range]:
        numel = self.manifest.tensors[key].numel
        for begin in range(0, numel, PART_NUMEL):
            yield key, begin, min(begin + PART_NUMEL, numel)

    def freeze(self) -> None:
        """From here on nothing changes before contents() has given it, or close() was called."""

    def regions(self) -> Iterator[list[Range]]:
        """What this process writes of it in another format: a parameter's master and states
        together, as loading reads them."""
        states: dict[str, list[str]] = {}
        for key in self.manifest.tensors:
            if key.startswith("optimizer/"):
                states.setdefault(name_of(key), []).append(key)
        for name in (*self.manifest.params, *self.manifest.buffers):
            keys = (master_key(name), *states.get(name, ()))
            yield [each for key in keys for each in self._ranges_of(key)]

    def contents(self, keys: Container[str]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """values() of the ranges of regions() of `keys`, each until the next is asked for.

        Regions come in any order.
        """
        ranges = (each for region in self.regions() for each in region if each[0] in keys)
        yield from self.values([*each] for _, each in groupby(ranges, itemgetter(0)))

    def close(self) -> None:
        """Frees what is held; idempotent."""

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_manifest(
    tensors: Mapping[str, TensorRecord],
    params: Mapping[str, ParamRecord] | None = None,
    optimizers: Iterable[Any] = (),
    states: Mapping[str, TensorRecord] | None = None,
) -> Manifest:
    """A manifest of tensors by name, of which `params` are parameters and the rest buffers.

    `params` are by default those of floating-point numbers; `states` are those of optimizer states,
    by key.
    """
    if params is None:
        floating = [name for name, tensor in tensors.items() if tensor.dtype.is_floating_point]
        params = {name: ParamRecord((), False, 0) for name in floating}
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
