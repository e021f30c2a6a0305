"""Files of torch.save(): plain data is read, and what asks for more than it has is refused."""

from __future__ import annotations

import io
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.checkpoint.torch_file import check_memory, load_plain
from offload.errors import CheckpointError

DATA: dict[str, Any] = {
    "param": torch.arange(6.0).view(2, 3),
    "step": 7,
    "list": [1, 2.5, "text", None, True, (1, (2, 3))],
    "dict": {(1, 2): "a pair", 3: {"nested": [torch.ones(2)] * 3}},
    "numbers": list(range(300)),
    "set": {1, 2, 3},
}
# A tuple that has the same tuple twice, 60 times over.
HUGE = b"K\x01" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))


def saved() -> bytes:
    stream = io.BytesIO()
    torch.save(DATA, stream)
    return stream.getvalue()


def archive(pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as made:
        made.writestr("archive/data.pkl", pickled)
        made.writestr("archive/version", b"3\n")
        made.writestr("archive/byteorder", b"little")
    return stream.getvalue()


def test_what_torch_saves(tmp_path: Path) -> None:
    path = tmp_path / "data.pt"
    path.write_bytes(saved())
    for source in (path, io.BytesIO(saved())):
        found = load_plain(source, "data")
        assert torch.equal(found.pop("param"), DATA["param"])
        assert torch.equal(found["dict"][3].pop("nested")[2], torch.ones(2))
        assert found["numbers"] == DATA["numbers"]
        assert found["set"] == DATA["set"]
        assert found["list"] == DATA["list"]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (archive(b"\x80\x02}" + HUGE + b"Ns."), "more objects"),
        (archive(b"\x80\x02}(" + HUGE + b"Nu."), "more objects"),
        (archive(b"\x80\x02cbuiltins\nset\n](" + HUGE + b"e\x85R."), "more objects"),
        (archive(b"\x80\x02N.", zipfile.ZIP_DEFLATED), "compressed"),
        (b"\x80\x02}Ns.", "not a zip file"),
    ],
)
def test_what_asks_for_more_than_it_has(content: bytes, match: str) -> None:
    with pytest.raises(CheckpointError, match=f"^it is damaged: .*{match}"):
        load_plain(io.BytesIO(content), "it")


def test_elements_over_the_same_memory() -> None:
    check_memory(torch.ones(4, 3).t(), "it")
    check_memory(torch.ones(0, 3), "it")
    for tensor in (torch.ones(1).expand(2**36), torch.ones(5).as_strided((3, 3), (1, 1))):
        with pytest.raises(CheckpointError, match=r"over (4|20) bytes: elements of it are"):
            check_memory(tensor, "it")
    with pytest.raises(CheckpointError, match="on meta"):
        check_memory(torch.ones(4, device="meta"), "it")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@given(data=st.data())
def test_changed_files(data: st.DataObject) -> None:
    """A file that was changed anywhere is read, or is an error of hetero's."""
    content = bytearray(saved())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.one_of(st.binary(max_size=3), st.sampled_from([HUGE, b"h\x01", b"\x86", b"2"]))
        )
    with suppress(CheckpointError):
        load_plain(io.BytesIO(bytes(content)), "it")
