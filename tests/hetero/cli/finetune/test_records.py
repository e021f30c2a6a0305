"""hetero/cli/finetune/records: data files, and what is said of damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.cli.finetune.records import read_records


def test_files_of_a_folder_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "\u2028"}\n\n{"text": "2"}\n')
    (tmp_path / "a.json").write_text('\ufeff[{"text": "0"}]', encoding="utf-8")
    (tmp_path / "c.txt").write_text("three\nlines\n")
    (tmp_path / "notes.md").write_text("no data")
    found = read_records(tmp_path)
    assert [record.content for record in found] == [
        {"text": "0"},
        {"text": "\u2028"},
        {"text": "2"},
        "three\nlines\n",
    ]
    places = [record.place.removeprefix(f"{tmp_path}/") for record in found]
    assert places == ["a.json, record 1", "b.jsonl, line 1", "b.jsonl, line 3", "c.txt"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("d.jsonl", b'{"a": 1}\n{"a": \n', "d.jsonl, line 2, column 7: no JSON"),
        ("d.json", b'[{"a": 1},\n {"a" 2}]', "d.json, line 2, column 7: no JSON"),
        ("d.json", b'{"a": 1}', r"d.json is one object.*put it into \[ \]"),
        ("d.txt", b"one\ntwo \xff", "d.txt, line 2: byte 0xff is no UTF-8; save"),
        ("d.txt", b"  \n", "has no records"),
        ("d.jsonl", b"\n", "has no records"),
        ("d.csv", b"a,b", r"ends in .csv; rename it.*\.jsonl"),
    ],
)
def test_damaged_files(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_records(tmp_path / name)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        read_records(tmp_path / "none")
    with pytest.raises(ValueError, match=r"has no file that ends in \.json"):
        read_records(tmp_path)
