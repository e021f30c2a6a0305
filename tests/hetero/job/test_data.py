"""The corpus: what is read, in which order it is seen, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero.job import data
from hetero.job.data import Corpus, load_corpus


def test_default_is_python_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the standard library alone, without its tests."""
    for name in ("a.py", "b/c.py", "site-packages/x.py", "b/test/y.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# the content of {name}\n")
    monkeypatch.setattr(data.sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    text = "# the content of a.py\n# the content of b/c.py\n"
    corpus = load_corpus(None, seq_len=len(text) - 1, seed=3)
    assert len(corpus) == len(text)
    (row,) = corpus.batch(1)
    assert bytes(row.tolist()).decode() == text[:-1]


def test_seed_decides_the_order_and_the_global_generator_does_not() -> None:
    text = bytes(range(256)) * 8
    torch.manual_seed(0)
    one = Corpus(text, "text", seq_len=16, seed=1).batch(8)
    assert (one.shape, one.dtype) == ((8, 16), torch.int64)
    torch.manual_seed(99)
    assert torch.equal(one, Corpus(text, "text", seq_len=16, seed=1).batch(8))
    assert not torch.equal(one, Corpus(text, "text", seq_len=16, seed=2).batch(8))


def test_batches_are_runs_of_the_text() -> None:
    text = bytes(range(200))
    for row in Corpus(text, "text", seq_len=10, seed=0).batch(50).tolist():
        assert bytes(row) in text


def test_folder_is_read_sorted_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"B" * 5)
    (tmp_path / "sub" / "c.txt").write_bytes(b"C" * 5)
    (tmp_path / "a.txt").write_bytes(b"A" * 5)
    (tmp_path / ".hidden").write_bytes(b"H" * 5)
    corpus = load_corpus(str(tmp_path), seq_len=14, seed=0)
    assert len(corpus) == 15
    assert bytes(corpus.batch(1)[0].tolist()) == b"AAAAABBBBBCCCC"


def test_cap_limits_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "CORPUS_CAP_BYTES", 12)
    (tmp_path / "a").write_bytes(b"A" * 10)
    (tmp_path / "b").write_bytes(b"B" * 10)
    assert len(load_corpus(str(tmp_path), seq_len=4, seed=0)) == 12


def test_exactly_one_sequence_and_one_byte_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"012345678")
    assert load_corpus(str(path), seq_len=8, seed=0).batch(2).shape == (2, 8)


def test_empty_folder_and_missing_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is empty"):
        load_corpus(str(tmp_path), seq_len=8, seed=0)
    with pytest.raises(ValueError, match="no such file or folder"):
        load_corpus(str(tmp_path / "none"), seq_len=8, seed=0)
