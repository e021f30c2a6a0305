"""Reads files of torch.save() that have tensors and plain data, and no more than they say.

torch.load(weights_only=True) runs nothing of a file, but takes what it asks for: an archive that
was compressed to a thousandth, a key whose hash takes years, a tensor of 2^36 elements that all are
the same four bytes.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from hetero.checkpoint.pickle_check import check_pickle
from offload.errors import CheckpointError

_PICKLES = 5  # that begin a file of torch before 1.6: two numbers, the system, the object, its keys


def load_plain(source: Path | io.BytesIO, name: str) -> Any:
    """What a file has, mapped rather than read where the file's kind allows it.

    Args:
        source: the file, or its bytes.
        name: what errors call it.

    Raises:
        CheckpointError: it cannot be read, is damaged, or asks for more than it has.
        pickle.UnpicklingError: it names something that is no plain data.
    """
    try:
        if isinstance(source, io.BytesIO):
            _check(source, source.getbuffer().nbytes)
            return torch.load(source, map_location="cpu", weights_only=True)
        if not source.is_file() and source.exists():  # opening a pipe would wait for a writer
            raise CheckpointError(f"{name} is not a regular file")
        with source.open("rb") as stream:
            _check(stream, os.fstat(stream.fileno()).st_size)
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            return torch.load(source, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
    except (ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from None


def _check(stream: IO[bytes], nbytes: int) -> None:
    """Raises ValueError or BadZipFile; the stream is at its beginning after it."""
    if not zipfile.is_zipfile(stream):
        stream.seek(0)
        for _ in range(_PICKLES):
            check_pickle(stream, nbytes, with_ids=True)
    else:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("it is compressed, which torch.save() does not do")
            if sum(member.file_size for member in members) > nbytes:
                raise ValueError(f"its members say that they have more than its {nbytes} bytes")
            for member in members:
                if member.filename.endswith("data.pkl"):
                    content = archive.read(member)
                    check_pickle(io.BytesIO(content), len(content), with_ids=True)
    stream.seek(0)


def check_memory(tensor: torch.Tensor, name: str) -> None:
    """Raises CheckpointError unless each element of a tensor has memory of its own."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise CheckpointError(f"{name} has a tensor that is {tensor.layout} on {tensor.device}")
    has = tensor.untyped_storage().nbytes()
    if tensor.nbytes > has:
        raise CheckpointError(
            f"{name} has a tensor of shape {tuple(tensor.shape)}, which is {tensor.nbytes} bytes, "
            f"over {has} bytes: elements of it are the same memory; save a copy, tensor.clone()"
        )
