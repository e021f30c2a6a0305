"""Saving a managed model as torch.distributed.checkpoint does, for FSDP2 and plain torch.

A flat range of a parameter is at most 2n - 1 boxes of n dimensions. Each rank plans boxes of its
own shards, and of replicas each writes some chunks. Values are read from homes as torch's writer
asks for them, into buffers that are used again, because it keeps the last tensor of every key.
DCP's checkpoints have no checksums, random numbers and `extra`: they are for exchange.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.api.whole_state import make_piece, parts_by_tile
from hetero.checkpoint.dcp.boxes import Box, boxes_of
from hetero.checkpoint.dcp.layout import MODEL, OPTIMIZER, STEP
from hetero.checkpoint.dcp.options import torch_options
from hetero.checkpoint.dcp.write import DcpWrite, Item, KeyPath, Part
from hetero.checkpoint.model_tensors import STATE_NAMES, ModelTensors
from hetero.checkpoint.save import Optimizers, check_optimizers, engine_of_model, listed
from hetero.chunk_groups.home_tiles import HomeTiles
from hetero.chunks.dtypes import Dtypes, check_dtype
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from offload.disk.new_folder import NewFolder
from offload.errors import CheckpointError, StoreError
from offload.interrupts import uninterrupted

_SAME_CLASS = (CheckpointError, StoreError)


@uninterrupted
@torch.no_grad()
def save_dcp(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    *,
    dtype: str | torch.dtype = "fp32",
) -> None:
    """Saves a managed model as a checkpoint of torch.distributed.checkpoint (DCP).

    dcp.load() reads it into FSDP2's and plain torch's state dicts, whatever their ranks: the layout
    is {"model": ..., "optim": ...} with what torch's get_state_dict(model, optimizer) gives. All
    ranks must call it, between steps: each writes its own shards, from their homes, a few MiB at a
    time, by DCP's planner and FileSystemWriter. Names of tied parameters share their bytes.

    It has no random numbers, no loss scale, no `extra` and no checksums: to go on with the same
    bits, use hetero.save().

    Args:
        path: the checkpoint's folder, which must not be there yet, or be empty; all ranks must see
            the same one.
        model: as hetero.initialize() returned it.
        optimizer: likewise, or the list; their states are in fp32, their options in the words of
            torch's optimizers. Default: parameters and buffers alone.
        dtype: of parameters, "fp32" (default: the masters as they are), "bf16" or "fp16" (or
            torch's); buffers keep their own.

    Raises:
        ValueError: something is at `path`, or torch's optimizers have no such option.
        StoreError, NativeIoError: the files cannot be written. Nothing is left then.
        CheckpointError: a rank does not see the folder that the first one has made.
        HeteroError: another rank met one of these.
    """
    engine = engine_of_model(model)
    engine.check_usable()
    optimizers = listed(optimizer)
    check_optimizers(engine, optimizers)
    everyone = engine.world.everyone
    rank = 0 if everyone is None else everyone.rank
    folder = NewFolder(path)
    write: DcpWrite | None = None

    def together(what: str, do: Callable[[], bytes]) -> list[bytes]:
        """Every rank's bytes, once none has failed."""
        failure, made = None, b""
        try:
            made = do()
        except Exception as error:
            failure = error
        engine.world.all_or_none(failure, f"{what} {folder.path}", _SAME_CLASS)
        if everyone is None:
            return [made]
        return everyone.all_gather_bytes(made, f"{what} {folder.path}")

    with ExitStack() as resources:
        resources.callback(folder.abandon)

        def begin() -> bytes:
            if rank == 0:
                _refuse_other(folder.path)
                folder.begin()
            return b""

        def plan() -> bytes:
            nonlocal write
            folder.require_seen(engine.world.name)
            contents = _Contents(engine, optimizers, rank, _torch_dtype(dtype), resources)
            write = DcpWrite(folder.incomplete, folder.path, contents.part(), rank)
            return write.plan()

        def finish() -> bytes:
            assert write is not None
            if rank == 0:
                write.finish(results)
                folder.complete()
            return b""

        together("begin to save", begin)
        plans = together("plan to save", plan)
        assert write is not None
        made = write
        results = together("save", lambda: made.write(plans))
        together("complete", finish)


def _refuse_other(path: Path) -> None:
    """Raises ValueError if something is at the path."""
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} is there already; give another path, or remove it")


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    name = check_dtype(str(dtype), "dtype")
    return Dtypes(name, name).torch_compute


class _Contents:
    """What this rank writes: boxes of its own shards, and on the first rank what is small."""

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[HybridOptimizer],
        rank: int,
        dtype: torch.dtype,
        resources: ExitStack,
    ) -> None:
        """Waits for the updates under way."""
        engine.schedule.revoke_all()
        engine.schedule.wait_all()
        engine.params.take_in_written(engine.params.managed.values())
        self._engine, self._optimizers = engine, optimizers
        self._dtype, self._resources = dtype, resources
        self._first = rank == 0
        self._model = ModelTensors.of(engine)
        self._names = {m: name for name, m in self._model.params.items()}
        self._chunks = [list(names) for names in self._model.own_chunks(engine)]

    def part(self) -> Part:
        """Raises ValueError for options that torch has not."""
        small = list(self._small()) if self._first else []
        items = [item for item, _ in small]
        for members in self._chunks:
            chunk_group = self._engine.params.group(members[0].chunk)
            for _, parts in parts_by_tile(chunk_group, members):
                for m, part in parts:
                    shape = tuple(m.param.shape)
                    for box in boxes_of(shape, part.in_param.start, part.in_param.stop):
                        for path, dtype in self._paths(m):
                            items.append(Item(path, shape, dtype, box))
        values = self._values([value for _, value in small])
        same: dict[str, list[KeyPath]] = {}
        for name, others in self._model.aliases.items():
            if others:
                same[f"{MODEL}.{name}"] = [(MODEL, other) for other in others]
        return Part(items, values, self._objects() if self._first else {}, same)

    def _paths(self, m: ManagedParam) -> list[tuple[KeyPath, torch.dtype]]:
        """Of what is written of a parameter, the master or value first."""
        name = self._names[m]
        found: list[tuple[KeyPath, torch.dtype]] = [((MODEL, name), self._dtype)]
        if m.chunk.trainable and self._optimizers:
            rule = self._engine.params.group(m.chunk).dtypes.rule
            found += [
                ((OPTIMIZER, "state", name, state), torch.float32) for state in STATE_NAMES[rule]
            ]
        return found

    def _small(self) -> Iterator[tuple[Item, torch.Tensor]]:
        def whole(path: KeyPath, value: torch.Tensor) -> tuple[Item, torch.Tensor]:
            shape = tuple(value.shape)
            return Item(path, shape, value.dtype, Box((0,) * value.ndim, shape)), value

        for name, tensor in self._model.plain.items():
            yield whole((MODEL, name), tensor.detach().cpu().clone())
        for m, name in self._names.items():
            if self._optimizers and m.chunk.trainable:
                step = torch.tensor(float(m.step))
                yield whole((OPTIMIZER, "state", name, STEP), step)
            if not m.numel:
                for path, dtype in self._paths(m):
                    yield whole(path, torch.empty(m.param.shape, dtype=dtype))

    def _objects(self) -> dict[KeyPath, object]:
        found: dict[KeyPath, object] = {}
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for number, group in enumerate(groups):
            options = {name: value for name, value in group.items() if name != "params"}
            where = f"param group {number}"
            names = [
                self._model.names[id(p)] for p in group["params"] if id(p) in self._model.names
            ]
            made = torch_options(options, where) | {"params": names}
            for name, value in made.items():
                found[OPTIMIZER, "param_groups", number, name] = value
        return found

    def _values(self, small: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The values of the items, in their order, from homes."""
        yield from small
        tiles: dict[int, HomeTiles] = {}
        for members in self._chunks:
            chunk = members[0].chunk
            chunk_group = self._engine.params.group(chunk)
            if chunk.group_index not in tiles:
                tiles[chunk.group_index] = HomeTiles(chunk_group)
                self._resources.callback(tiles[chunk.group_index].close)
            by_tile = dict(parts_by_tile(chunk_group, members))
            for tile in tiles[chunk.group_index].read(chunk):
                for m, part in by_tile.get(tile.number, ()):
                    piece = make_piece(chunk_group, m, part, tile.values, tile.optim_state)
                    found = [piece.master()]
                    if len(self._paths(m)) > 1:
                        found += piece.states()
                    begin = 0
                    for box in boxes_of(
                        tuple(m.param.shape), part.in_param.start, part.in_param.stop
                    ):
                        for value, (_, dtype) in zip(found, self._paths(m), strict=True):
                            flat = value[begin : begin + box.numel]
                            yield flat.to(device="cpu", dtype=dtype).view(box.sizes)
                        begin += box.numel
