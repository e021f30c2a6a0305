"""RECORD payloads: what completes a parameter to its fp32 master, and the optimizer's states."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.state.homes import Homes
from hetero.state.managed_param import ManagedParam
from offload._native import Location, StepPipeline, join_master, split_master
from offload.device.backend import Updater
from offload.disk.backing import Extent, FileTransfers
from offload.memory.arena import HostArena


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Record:
    """One piece's record, as flat tensors of piece_numel elements.

    `master` has the lower 16 bits of the fp32 master (as int16) for bf16, the whole master for
    fp16, and is None for fp32. `states` are the rule's, in its order; for bf16 one bit of the last
    one belongs to the split master (docs/formats.md).
    """

    master: torch.Tensor | None
    states: tuple[torch.Tensor, ...]

    @classmethod
    def over(cls, raw: torch.Tensor, piece_numel: int, dtypes: Dtypes) -> Record:
        """Views of a record's bytes, laid out [master | state 0 | state 1]."""
        master_end = piece_numel * dtypes.master_bytes
        master_dtype = torch.int16 if dtypes.compute == "bf16" else torch.float32
        return cls(
            raw[:master_end].view(master_dtype) if master_end else None,
            tuple(raw[master_end:].view(dtypes.torch_state).split(piece_numel)),
        )


@dataclass(frozen=True)
class Part:
    """The elements of one parameter that lie in one piece of its chunk."""

    piece: int
    in_param: slice  # of the flat parameter
    in_piece: slice

    @property
    def numel(self) -> int:
        """Elements."""
        return int(self.in_piece.stop - self.in_piece.start)


def parts_of(managed: ManagedParam, layout: Layout, rank: int | None = None) -> Iterator[Part]:
    """The parameter's elements in a rank's shard (default: this rank's), cut at piece borders."""
    in_shard, in_param = managed.in_shard(layout, rank)
    numel = layout.piece_numel
    begin = in_shard.start
    shift = in_param.start - begin
    while begin < in_shard.stop:
        piece = begin // numel
        end = min((piece + 1) * numel, in_shard.stop)
        yield Part(
            piece,
            slice(begin + shift, end + shift),
            slice(begin - piece * numel, end - piece * numel),
        )
        begin = end


class Records:
    """Access to records wherever they live, between steps.

    They are of this rank's shards. A DISK-homed record passes through the first of the pipeline's
    buffers, one piece at a time.
    """

    def __init__(
        self,
        piece_numel: int,
        dtypes: Dtypes,
        homes: Homes,
        extents: dict[int, Extent],
        buffers: HostArena,
        transfers: FileTransfers,
        pipeline: StepPipeline,
        updater: Updater | None = None,
    ) -> None:
        """`updater` does what the CPU cannot with records on DEVICE."""
        self._updater = updater
        self._piece_numel = piece_numel
        self._dtypes = dtypes
        self._kind = dtypes.kind
        self._piece_bytes = piece_numel * dtypes.record_bytes
        self._homes = homes
        self._extents = extents
        self._buffers = buffers
        self._transfers = transfers
        self._pipeline = pipeline
        # A rank's server reads records too. Held while an update runs, and while one is open.
        self.lock = threading.RLock()
        # Called when the pipeline was made to forget what it has read ahead.
        self.after_forget: Callable[[], object] = _nothing

    def in_file(self, chunk: Chunk) -> bool:
        """Whether the chunk's records are homed on DISK."""
        return chunk not in self._homes

    def location(self, chunk: Chunk, piece: int) -> Location:
        """Where the optimizer finds the piece's record."""
        if chunk in self._homes:
            return Location(self._homes.address(chunk, piece))
        return Location(file_offset=self._offset(chunk, piece))

    def address(self, chunk: Chunk, piece: int) -> int:
        """Address of a piece's record that is at home in memory."""
        return self._homes.address(chunk, piece)

    def _offset(self, chunk: Chunk, piece: int) -> int:
        return self._extents[chunk.id].offset + piece * self._piece_bytes

    @contextmanager
    def open(
        self, chunk: Chunk, piece: int, write: bool = False, fresh: bool = False
    ) -> Iterator[Record | None]:
        """The piece's record inside the block (None: frozen); with `write` it goes home afterwards.

        With `fresh` it starts as zeros instead of what is at home.
        """
        if not chunk.trainable:
            yield None
            return
        with self.open_raw(chunk, piece, write, fresh) as raw:
            yield self.over(raw)

    def over(self, raw: torch.Tensor) -> Record:
        """The record in a piece's bytes."""
        return Record.over(raw, self._piece_numel, self._dtypes)

    def empty(self) -> torch.Tensor:
        """Memory for the bytes of one piece's record."""
        return torch.empty(self._piece_bytes, dtype=torch.uint8)

    def use(self, pipeline: StepPipeline) -> None:
        """The bank has got another pipeline; all is written that the old one had."""
        self._pipeline = pipeline

    @contextmanager
    def open_raw(
        self, chunk: Chunk, piece: int, write: bool = False, fresh: bool = False
    ) -> Iterator[torch.Tensor]:
        """The bytes of a trainable piece's record, likewise."""
        with self.lock:
            if write or chunk not in self._homes:
                self._pipeline.forget()
                self.after_forget()
            if chunk in self._homes:
                begin = piece * self._piece_bytes
                raw = self._homes.flat(chunk)[begin : begin + self._piece_bytes]
                if fresh:
                    raw.zero_()
                yield raw
            else:
                with self._in_buffer(chunk, piece, write, fresh) as raw:
                    yield raw

    @contextmanager
    def _in_buffer(
        self, chunk: Chunk, piece: int, write: bool, fresh: bool
    ) -> Iterator[torch.Tensor]:
        raw = self._buffers.view(0, 1, torch.uint8)[: self._piece_bytes]
        offset = self._offset(chunk, piece)
        if fresh:
            raw.zero_()
        else:
            self._transfers.read(raw.data_ptr(), self._piece_bytes, offset).wait()
        yield raw
        if write:
            self._transfers.write(raw.data_ptr(), self._piece_bytes, offset).wait()

    def split(
        self, values: torch.Tensor, param: torch.Tensor, record: Record, where: slice
    ) -> None:
        """Writes fp32 `values` as parameter and master; `where` are its elements in the piece."""
        if self._dtypes.compute == "fp32":
            param.copy_(values)
        elif self._dtypes.compute == "fp16":
            assert record.master is not None
            record.master[where] = values
            param.copy_(values)
        else:
            assert record.master is not None
            values = values.to(param.device).contiguous()
            carrier = record.states[-1][where]
            if param.device.type != "cpu":
                assert self._updater is not None
                self._updater.split(values, param, record.master[where], carrier)
                return
            split_master(
                self._kind,
                values.data_ptr(),
                param.data_ptr(),
                record.master[where].data_ptr(),
                carrier.data_ptr(),
                values.numel(),
            )

    def states(self, record: Record, where: slice) -> list[torch.Tensor]:
        """The rule's states in fp32, without the bit of the last one that the split uses."""
        *others, last = (state[where] for state in record.states)
        if self._dtypes.compute == "bf16":
            if self._dtypes.rule == "lion":
                bits = torch.int32 if self._dtypes.state == "fp32" else torch.int16
                last = (last.view(bits) & ~1).view(last.dtype)
            else:
                last = last.abs()
        return [state.float() for state in (*others, last)]

    def join(self, param: torch.Tensor, record: Record, where: slice) -> torch.Tensor:
        """The fp32 master of the flat parameter part `param`, where the record is.

        (`param` may be a copy on DEVICE of what is in RAM.)
        """
        if self._dtypes.compute == "fp32":
            return param.clone()
        assert record.master is not None
        if self._dtypes.compute == "fp16":
            return record.master[where].clone()
        master, carrier = record.master[where], record.states[-1][where]
        param = param.to(master.device).contiguous()
        values = torch.empty(param.numel(), dtype=torch.float32, device=master.device)
        if master.device.type != "cpu":
            assert self._updater is not None
            self._updater.join(param, master, carrier, values)
            return values
        join_master(
            self._kind,
            param.data_ptr(),
            master.data_ptr(),
            carrier.data_ptr(),
            values.data_ptr(),
            values.numel(),
        )
        return values
