"""The manifest: every change of it is found, and a made-up one is valid or a CheckpointError."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from hetero.checkpoint.data_writer import WrittenFile
from hetero.checkpoint.hetero_checkpoint import HeteroCheckpoint
from hetero.checkpoint.manifest import (
    NAME,
    GroupRecord,
    Manifest,
    OptimizerRecord,
    ParamRecord,
    TensorRecord,
    master_key,
    read_manifest,
    state_key,
)
from hetero.checkpoint.plain_data import pack
from offload.errors import CheckpointError
from tests.support.manifests import checksummed, mutations, with_odd_members
from tests.support.traced_memory import traced_memory

STATES = ("exp_avg", "exp_avg_sq")
SAMPLE = Manifest(
    step=7,
    files={"rank-0000-of-0001.safetensors": WrittenFile(8192, 4096, 123)},
    tensors={
        "model/a.weight": TensorRecord((3, 4), torch.float32),
        **{f"optimizer/a.weight/{s}": TensorRecord((3, 4), torch.bfloat16) for s in STATES},
        "model/frozen": TensorRecord((2,), torch.bfloat16),
        "model/count": TensorRecord((), torch.int64),
        "data/0/0": TensorRecord((0, 5), torch.uint8),
    },
    params={
        "a.weight": ParamRecord(("tied.weight",), True, 7),
        "frozen": ParamRecord((), False, 0),
    },
    buffers=("count",),
    optimizers=(
        OptimizerRecord(
            "HybridAdam", STATES, "bf16", (GroupRecord({"lr": 0.1}, ("a.weight", "frozen")),)
        ),
    ),
    loss_scale={"value": 256.0, "window": 2000, "good_steps": 3, "skipped_steps": 1},
    ranks=({"random": {}, "extra": {"t": pack((1,), "t", [])}},),
)


def read_content(folder: Path, content: bytes) -> Manifest:
    (folder / NAME).write_bytes(content)
    return read_manifest(folder)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_content(tmp_path, SAMPLE.to_json()) == SAMPLE
    assert read_content(tmp_path, checksummed(json.loads(SAMPLE.to_json()))) == SAMPLE


def is_valid(made: Manifest) -> bool:
    """What later code takes for granted."""
    shapes = {key: record.shape for key, record in made.tensors.items()}
    for name, param in made.params.items():
        assert isinstance(param.trained, bool)
        assert 0 <= param.step <= 2**53
        assert made.tensors[master_key(name)].dtype.is_floating_point
    for optimizer in made.optimizers:
        for group in optimizer.groups:
            for name in set(group.params) & {n for n, p in made.params.items() if p.trained}:
                for state in optimizer.states:
                    assert shapes[state_key(name, state)] == shapes[master_key(name)]
    for record in made.tensors.values():
        assert record.numel * record.dtype.itemsize < 2**63
    for name in made.files:
        assert name == os.path.basename(name)
        assert os.fsencode(name).isascii()
        assert not name.startswith(".")
    return all(master_key(name) in shapes for name in made.buffers)


def read_mutated(folder: Path, content: Any) -> None:
    try:
        made = read_content(folder, checksummed(content))
    except CheckpointError:
        return
    assert is_valid(made)
    # What is read is also written, and read again as the same.
    assert read_content(folder, made.to_json()) == made


@given(mutations(SAMPLE.to_json()))
def test_changed_members_with_a_right_checksum(tmp_path: Path, content: Any) -> None:
    read_mutated(tmp_path, content)


def test_every_member_with_odd_values(tmp_path: Path) -> None:
    for content in with_odd_members(SAMPLE.to_json()):
        read_mutated(tmp_path, content)


@pytest.mark.parametrize("content", [None, 3, "x", [], [1], {}, {"format": "hetero checkpoint"}])
def test_other_json(content: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=NAME):
        read_content(tmp_path, checksummed(content))


def test_bits_that_flip_are_found(tmp_path: Path) -> None:
    content = SAMPLE.to_json()
    generator = random.Random(3)
    for at in range(0, len(content), 3):
        changed = bytearray(content)
        changed[at] ^= 1 << generator.randrange(8)
        with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
            read_content(tmp_path, bytes(changed))


def test_files_that_are_cut_off_are_found(tmp_path: Path) -> None:
    content = SAMPLE.to_json()
    for length in range(0, len(content), 5):
        with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
            read_content(tmp_path, content[:length])


def changed(**members: Any) -> dict[str, Any]:
    return {**json.loads(SAMPLE.to_json()), **members}


def with_tensor(key: str, *record: Any) -> dict[str, Any]:
    content = json.loads(SAMPLE.to_json())
    content["tensors"][key] = list(record)
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(format="tar"), "is not of a hetero checkpoint, but of 'tar'"),
        (changed(version=2), "is of version 2 of the format, and this hetero reads version 1"),
        (changed(files={"a\0b": {}}), "is damaged|no name of a data file|lacks"),
        (changed(files={"../a": dict.fromkeys(["nbytes", "header_nbytes", "header_crc32c"], 0)}),
         "'../a' is no name of a data file"),
        (changed(loss_scale={"update": 3}), "loss_scale has the fields"),
        (changed(loss_scale={"value": 0, "window": 1, "good_steps": 0, "skipped_steps": 0}),
         "loss_scale has value = 0"),
        (changed(buffers=["count", "a.weight"]), "'a.weight' as a parameter and as a buffer"),
        (changed(buffers=["count", "mean"]), "the buffer 'mean', and no tensor of it"),
        (with_tensor("model/a.weight", "bfloat16", 3, 4), "master of 'a.weight' is torch.bfloat16"),
        (with_tensor("model/frozen", "int8", 2), "'frozen' is torch.int8, must be floats"),
        (with_tensor("optimizer/a.weight/exp_avg", "float32", 4, 3), "the state 'exp_avg'"),
        (with_tensor("optimizer/a.weight/exp_avg", "uint8", 3, 4), "'a.weight' is torch.uint8"),
        (with_tensor("x", "qint8", 0), "'x' of tensors .* has the dtype 'qint8', which is unknown"),
        (with_tensor("x", "float32", 0, 2**62), "'x' of tensors .* which no tensor can have"),
        (with_tensor("x", "int8", *[2**62] * 1000), "'x' of tensors .* has the shape"),
        (with_tensor("x", "int8", *[1] * 65), "'x' of tensors .* has the shape"),
        (with_tensor("x", "int8", -1), "must be a dtype and sizes"),
        (with_tensor("x", "int8", True), "must be a dtype and sizes"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_content(tmp_path, checksummed(content))


@pytest.mark.parametrize("said", ["\ud800", "", "0000000", "0000000G", "00000000\n"])
def test_a_checksum_that_is_none(said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is damaged: its checksum is"):
        read_content(tmp_path, json.dumps(changed(crc32c=said)).encode())


def test_claims_take_no_memory(tmp_path: Path) -> None:
    """A tensor of 2**50 elements is found to be missing before it has memory."""
    content = checksummed({**with_tensor("data/0/1", "float32", 2**50), "files": {}})
    huge = b'{"a": ' + b"[" * 9_000
    with traced_memory() as traced:
        (tmp_path / NAME).write_bytes(content)
        with pytest.raises(CheckpointError, match="elements of .*, and the manifest says"):
            HeteroCheckpoint(tmp_path).open()
        with pytest.raises(CheckpointError, match="is damaged: it is no JSON"):
            read_content(tmp_path, huge)
        _, peak_bytes = traced()
    assert peak_bytes < 20 << 20


def test_no_product_of_thousands_of_sizes_is_made(tmp_path: Path) -> None:
    """It would have millions of digits."""
    content = with_tensor("x", "int8", *[2**62] * 200_000)
    with pytest.raises(CheckpointError, match="which no tensor can have"):
        read_content(tmp_path, checksummed(content))


def test_what_is_no_file_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=f"{NAME} cannot be read: No such file"):
        read_manifest(tmp_path)
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_manifest(tmp_path)
    (tmp_path / NAME).unlink()
    content = SAMPLE.to_json()
    monkeypatch.setattr("hetero.checkpoint.manifest._MOST_BYTES", 100)
    with pytest.raises(CheckpointError, match="and may have 100"):
        read_content(tmp_path, content)
    with pytest.raises(ValueError, match=f"would have {len(content)} bytes, and may have 100"):
        SAMPLE.to_json()  # what could not be read is not written
