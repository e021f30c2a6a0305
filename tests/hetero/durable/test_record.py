"""hetero/durable/record: what is decoded is what was encoded, or an error that names the file."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.durable import record as format_
from hetero.durable.record import OtherFormatError, Record
from offload.errors import CheckpointError
from offload.memory.sizes import PAGE_BYTES
from tests.support.durable.records import SAMPLE, sample, sealed, sections_of
from tests.support.manifests import mutations, with_odd_members
from tests.support.traced_memory import traced_memory

WHERE = "/x/000003-rank-0000-of-0001.commit-1"
NUMBERS, SECTIONS = sections_of(sample())


def decode(content: bytes, where: str) -> Record | None:
    return format_.decode(io.BytesIO(content), where)


def decoded(content: bytes) -> Record | None:
    """What it says; an error may be a CheckpointError alone, that names the file and is short."""
    message, found = WHERE, None
    try:
        found = decode(content, WHERE)
    except CheckpointError as error:
        message = str(error)
    assert WHERE in message, message
    assert len(message) < 2000
    return found


def test_what_was_encoded_is_decoded() -> None:
    found = decoded(sample())
    assert found is not None
    assert found == Record(**{**vars(SAMPLE), "small": found.small})
    assert list(found.small) == list(SAMPLE.small)
    for key, tensor in SAMPLE.small.items():
        assert torch.equal(found.small[key], tensor)
        assert found.small[key].dtype == tensor.dtype
    assert sealed(NUMBERS, SECTIONS) == sample()


def test_a_file_that_nothing_was_written_to_has_no_record() -> None:
    assert decode(b"", WHERE) is None
    assert decode(bytes(2 * PAGE_BYTES), WHERE) is None


def test_bits_that_flip_are_found() -> None:
    """Each bit of the first page, and some of the rest: padding does not count."""
    content = sample()
    end = PAGE_BYTES + sum(map(len, SECTIONS))
    generator = random.Random(3)
    bits = [*range(8 * 200), *(generator.randrange(8 * end) for _ in range(2000))]
    for bit in bits:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError, match=WHERE):
            decode(bytes(changed), WHERE)


def test_what_is_cut_off_is_found() -> None:
    content = sample()
    end = PAGE_BYTES + sum(map(len, SECTIONS))
    for size in (1, 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, end - 1):
        with pytest.raises(CheckpointError, match=WHERE):
            decode(content[:size], WHERE)
    assert decode(content[:end], WHERE) is not None


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, b"Hetero", "no record of a commit"),
        (16, bytes([1, 2, 3, 4]), "another byte order"),
        (20, bytes([3, 0, 0, 0]), "version 3 of the format, a later one.*reads version 2"),
        (20, bytes([1, 0, 0, 0]), "version 1 of the format, an earlier one.*reads version 2"),
    ],
)
def test_files_of_others_are_told_from_damaged_ones(at: int, value: bytes, match: str) -> None:
    """Before the checksum is looked at, which they may compute in another way."""
    content = bytearray(sample())
    content[at : at + len(value)] = value
    with pytest.raises(CheckpointError, match=match) as caught:
        decode(bytes(content), WHERE)
    assert isinstance(caught.value, OtherFormatError) == (at > 0)


def test_checksums_are_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """Of a sparse file of 64 GiB: a record of 64 MiB is written and read with a few pieces."""
    tiles = (1 << 36) // SAMPLE.groups[0].optim_state_bytes
    chunk = replace(SAMPLE.groups[0].chunks[0], slots=tiles, optim_state=1 << 37)
    group = replace(SAMPLE.groups[0], chunks=(chunk, *SAMPLE.groups[0].chunks[1:]), places=(0, 1))
    frozen = replace(group.chunks[1], param=1 << 36)
    group = replace(group, chunks=(chunk, frozen))
    record = replace(SAMPLE, groups=(group,))
    path = tmp_path / "record"
    with traced_memory() as traced, path.open("w+b") as stream:
        pieces = (bytes(nbytes // PAGE_BYTES * 4) for _, _, nbytes in group.pieces())
        format_.write(record, lambda _: pieces, stream.fileno())
        found = format_.read_record(str(path), ())
        _, peak_bytes = traced()
    assert found is not None
    assert path.stat().st_size > 64 << 20
    assert peak_bytes < 4 << 20


def test_numbers_that_cannot_be() -> None:
    for numbers in ([0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 0, 0]):
        with pytest.raises(CheckpointError, match=WHERE):
            decode(sealed(numbers, SECTIONS), WHERE)


def resealed(section: int, content: Any) -> bytes:
    """The sample with another content of a JSON section."""
    text = json.dumps(content).encode()
    return sealed(NUMBERS, [text if i == section else s for i, s in enumerate(SECTIONS)])


def test_every_member_with_odd_values() -> None:
    """In what hetero itself writes about groups; test_manifest.py does so with the manifest."""
    for content in with_odd_members(SECTIONS[1]):
        decoded(resealed(1, content))


@given(mutations(SECTIONS[1]))
def test_changed_groups_with_right_checksums(content: Any) -> None:
    decoded(resealed(1, content))


@given(st.integers(0, 3), st.binary(max_size=64))
def test_any_section_with_right_checksums(section: int, content: bytes) -> None:
    sections = [content if i == section else s for i, s in enumerate(SECTIONS)]
    decoded(sealed(NUMBERS, sections))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=8))
def test_any_numbers_with_right_checksums(numbers: list[int]) -> None:
    """Sizes that no memory could hold are refused before anything is allocated."""
    rest = b"".join(SECTIONS)
    head = format_._head(0, format_.crc_of(rest), *numbers)
    head = format_._head(format_.crc_of(head), format_.crc_of(rest), *numbers)
    assert decoded(head + rest) is None
