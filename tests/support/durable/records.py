"""Commit records: a sample, and files whose checksums are right whatever their sections say."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import torch

from hetero.checkpoint.manifest import TensorRecord
from hetero.durable import record as format_
from hetero.durable.record import Record, StoredChunk, StoredGroup, StoredSlice, write
from offload.memory.sizes import PAGE_BYTES, round_up
from tests.hetero.checkpoint.test_manifest import SAMPLE as MANIFEST
from tests.hetero.checkpoint.test_manifest import STATES

_TILE = 2048
_PAGES = 1 + 5 + 1  # of 2048 parameters, 20480 bytes of optimizer state, frozen parameters

SAMPLE = Record(
    generation=3,
    number=7,
    rank=0,
    ranks=1,
    manifest=replace(
        MANIFEST,
        files={},
        tensors={
            "model/a.weight": TensorRecord((30, 40), torch.float32),
            **{f"optimizer/a.weight/{s}": TensorRecord((30, 40), torch.float32) for s in STATES},
            "model/frozen": TensorRecord((2,), torch.bfloat16),
            "model/count": TensorRecord((), torch.int64),
            "data/0/0": TensorRecord((5,), torch.uint8),
        },
        loss_scale=None,
    ),
    groups=(
        StoredGroup(
            compute="bf16",
            rule="adam",
            state="fp32",
            tile_numel=_TILE,
            rank=0,
            ranks=1,
            name="000003-rank-0000-of-0001-group-000.data",
            places=(0, 2),
            weights=(1, 2),
            unit_bytes=1 << 20,
            chunks=(
                StoredChunk(1, True, (StoredSlice("a.weight", 64, 1200),), 0, 16384),
                StoredChunk(1, False, (StoredSlice("frozen", 0, 2),), 65536, None),
            ),
        ),
    ),
    small={
        "model/count": torch.tensor(4),
        "data/0/0": torch.arange(5, dtype=torch.uint8),
    },
)


def sections_of(content: bytes) -> tuple[list[int], list[bytes]]:
    """The numbers in the head of a record (generation, number, rank, ranks), and its sections."""
    _, _, _, _, _, *numbers = format_._HEAD.unpack_from(content)
    found, at = [], PAGE_BYTES
    for size in numbers[4:]:
        found.append(content[at : at + size])
        at += size
    return numbers[:4], found


def sealed(numbers: list[int], sections: list[bytes]) -> bytes:
    """A record's file of these sections, with right checksums."""
    rest, sizes = b"".join(sections), [len(section) for section in sections]
    crc = format_.crc_of(rest)
    head = format_._head(0, crc, *numbers, *sizes)
    head = format_._head(format_.crc_of(head), crc, *numbers, *sizes)
    return (head + rest).ljust(round_up(len(head) + len(rest), PAGE_BYTES), b"\0")


def sample() -> bytes:
    """The sample's file."""
    with tempfile.TemporaryFile() as stream:
        write(SAMPLE, lambda _: [bytes(range(4)) * _PAGES], stream.fileno())
        return stream.read()
