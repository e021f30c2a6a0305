"""Bad input ends in an error that names the thing and the fix, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

import hetero
from tests.support.training.loops import batches, build, tiny_gpt2

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("missing", errno.ENOENT, "nvme_path does not exist.*mkdir -p"),
        ("file", errno.ENOTDIR, "nvme_path is not a directory"),
        (".", errno.EACCES, "nvme_path is not writable"),
    ],
)
def test_paths(
    name: str, number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(hetero.StoreError, match=words) as error:
        build(placement_policy="nvme", nvme_path=str(tmp_path / name))
    assert error.value.errno == number
    assert error.value.filename == str(tmp_path / name)


def test_no_o_direct_falls_back_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def without_direct(path: str, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(path, flags, *args)

    monkeypatch.setattr(os, "open", without_direct)
    model, optimizer = build(placement_policy="nvme", nvme_path=str(tmp_path))
    assert any("no O_DIRECT" in note for note in optimizer.engine.notes)
    tokens = batches(1)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.engine.close()


def test_options_are_those_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"placement_policy": "cpu", "dtype": "fp16"}')
    config = hetero.ZeroInitContext(str(path), dtype="fp32").construction.config
    assert (config.placement_policy, config.dtype) == ("cpu", "fp32")
    with pytest.raises(ValueError, match="unknown option 'placement_polcy'.*placement_policy"):
        hetero.ZeroInitContext(placement_polcy="nvme")


def test_foreign_parameters() -> None:
    with hetero.ZeroInitContext(placement_policy="cpu"):
        model = tiny_gpt2()
    other = torch.nn.Linear(3, 5)
    optimizer = hetero.HybridAdam([*model.parameters(), *other.parameters()])
    with pytest.raises(ValueError, match=r"param group 0 .* shape \(5, 3\) that is not one of"):
        hetero.initialize(model, optimizer)


def test_unmanaged_parameters() -> None:
    linear = torch.nn.Linear(3, 5)
    optimizer = hetero.HybridAdam(linear.parameters())
    linear(torch.ones(3)).sum().backward()
    with pytest.raises(hetero.UnmanagedParameterError, match=r"not managed .*\(5, 3\).*initialize"):
        optimizer.step()
    with pytest.raises(hetero.UnmanagedParameterError), hetero.gathered(linear.weight):
        pass
    with pytest.raises(hetero.UnmanagedParameterError):
        hetero.clip_grad_norm_(linear.parameters(), 1.0)


def test_use_after_close(tmp_path: Path) -> None:
    """A second close() does nothing. (The page of touches has the uses of parameters.)"""
    model, optimizer = build(placement_policy="nvme", nvme_path=str(tmp_path), host_memory="400KiB")
    optimizer.engine.close()
    optimizer.engine.close()
    tokens = batches(1)[0]
    with pytest.raises(hetero.ClosedError, match="closed"):
        model(input_ids=tokens)
    with pytest.raises(hetero.ClosedError):
        model.transformer(input_ids=tokens)
    with pytest.raises(hetero.ClosedError):
        optimizer.step()
    with pytest.raises(hetero.ClosedError), hetero.gathered(model.parameters()):
        pass
    assert set(optimizer.engine.ledger.in_use_bytes.values()) == {0}


def test_refused_budget_leaves_a_model_that_can_be_tried_again() -> None:
    torch.manual_seed(0)
    model = tiny_gpt2()
    optimizer = hetero.HybridAdam(model.parameters())
    with pytest.raises(hetero.BudgetError):
        hetero.initialize(model, optimizer, placement_policy="cpu", host_memory="1MiB")
    model, optimizer = hetero.initialize(
        model, optimizer, placement_policy="cpu", host_memory="8MiB"
    )
    optimizer.engine.close()


def test_disk_full_while_writing_is_an_error_with_numbers(tmp_path: Path) -> None:
    model, optimizer = build(placement_policy="nvme", nvme_path=str(tmp_path))
    tokens = batches(1)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.engine.chunk_groups[0].disk.io.inject("write", 0, errno.ENOSPC)
    with pytest.raises(OSError, match=r"write of \d+ bytes at offset \d+ of .*No space") as error:
        optimizer.step()
        optimizer.engine.synchronize()
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        optimizer.step()
    optimizer.engine.close()
