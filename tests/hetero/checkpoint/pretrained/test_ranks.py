"""Several ranks export one folder that a plain process reads, and load one together."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import hetero
from hetero.checkpoint.pretrained import weight_files
from hetero.checkpoint.pretrained.safetensors_checkpoint import SafetensorsCheckpoint
from tests.support.checkpoint.exports import assert_same, masters_of
from tests.support.ranks.processes import RankPool
from tests.support.ranks.rank_training import BASE
from tests.support.training.saved_models import FAMILIES, batches, loss_of


def managed(
    rank: int, family: str, options: dict[str, Any], mesh: tuple[int, ...] | None = None
) -> tuple[Any, hetero.HybridAdam]:
    """A model that has made a step, so that masters have bits that parameters lack."""
    where = {} if mesh is None else {"mesh": init_device_mesh("cpu", mesh)}
    torch.manual_seed(3)
    with hetero.ZeroInitContext(BASE | options, **where):
        model = FAMILIES[family].make(2)
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), lr=1e-2))
    loss_of(model, batches()[rank % 2]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def export(
    rank: int,
    world: int,
    family: str,
    options: dict[str, Any],
    folder: str,
    dtype: str | None,
    mesh: tuple[int, ...] | None,
) -> dict[str, Any]:
    """Exports, loads what was exported after a further step, and says what there was."""
    model, optimizer = managed(rank, family, options, mesh)
    written: list[int] = []
    write = weight_files.write_all

    def noted(descriptor: int, content: Any, offset: int) -> None:
        written.append(len(content) if offset else 0)  # (headers are at 0)
        write(descriptor, content, offset)

    weight_files.write_all = noted
    try:
        hetero.save_pretrained(model, folder, dtype=dtype, max_shard_bytes="150KB")
    finally:
        weight_files.write_all = write
    found = {"masters": masters_of(model), "written": sum(written)}
    loss_of(model, batches()[rank % 2]).backward()
    optimizer.step()
    hetero.load_pretrained(model, folder)
    found["loaded"] = masters_of(model)
    found["state"] = model.state_dict()
    optimizer.engine.close()
    return found


def fail_on_one(rank: int, world: int, path: str) -> list[str]:
    """What this rank met when rank 1 failed in several ways, and that all goes on after each."""
    model, optimizer = managed(rank, "llama-untied", {"dtype": "bf16"})
    errors: list[str] = []

    def refused(call: Any, *args: Any, **options: Any) -> None:
        try:
            call(model, *args, **options)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append("nothing")

    def list_folder() -> None:
        wait = optimizer.engine.world.all_gather
        wait(torch.zeros(1), "the end of rank 0's call")
        errors.append(str(sorted(each.name for each in Path(path).iterdir())))
        wait(torch.zeros(1), "the other rank's look")

    out, own = Path(path) / "out", Path(path) / f"own-{rank}"
    pwrite, preadv, realpath = os.pwrite, os.preadv, os.path.realpath

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == 1:
        os.pwrite = full
    refused(hetero.save_pretrained, out)
    os.pwrite = pwrite
    list_folder()

    # Rank 1 looks elsewhere, as on a machine that does not share the folder.
    if rank == 1:
        os.path.realpath = lambda path: f"{realpath(path)}-elsewhere"  # type: ignore
    refused(hetero.save_pretrained, out)
    os.path.realpath = realpath
    refused(hetero.save_pretrained, out, dtype="fp32" if rank else "bf16")
    list_folder()

    hetero.save_pretrained(model, out, dtype="fp32")
    expected = masters_of(model)
    own.symlink_to(out)
    if rank == 1:
        os.remove(own)
    refused(hetero.load_pretrained, own)
    if rank == 1:
        own.mkdir()
        (own / "model.safetensors").write_bytes(other_order(out / "model.safetensors"))
    refused(hetero.load_pretrained, own)
    if rank == 1:
        os.preadv = full
    refused(hetero.load_pretrained, out)
    time.sleep(0.5 * rank)  # so long that the other one looks whether it waits in vain
    os.preadv = preadv
    refused(hetero.save_pretrained, out)

    hetero.load_pretrained(model, out)
    same = all(torch.equal(t, expected[n]) for n, t in masters_of(model).items())
    errors.append(f"goes on: {same}")
    loss_of(model, batches()[rank]).backward()
    optimizer.step()
    optimizer.engine.close()
    return errors


def other_order(path: Path) -> bytes:
    """A file with the same tensors as another one, in the reverse order."""
    from safetensors.torch import load_file, save

    assert SafetensorsCheckpoint(path).tensors
    return bytes(save(dict(reversed(load_file(path).items())), {"other": "file"}))


DISK = {"placement_policy": "nvme", "host_memory": "4MiB"}


@pytest.mark.parametrize(
    ("family", "world", "mesh", "options", "dtype"),
    [
        ("llama-untied", 2, None, {"dtype": "bf16", **DISK}, "fp32"),
        ("mixtral-fused", 3, None, {"dtype": "fp32"}, None),
        ("gpt2-tied", 2, None, {"dtype": "bf16", "zero_stage": 1}, None),
        ("gpt2-tied", 4, (2, 2), {"dtype": "bf16"}, "fp32"),
    ],
)
def test_a_plain_process_reads_what_ranks_export(
    tmp_path: Path,
    family: str,
    world: int,
    mesh: tuple[int, ...] | None,
    options: dict[str, Any],
    dtype: str | None,
    ranks_of: Callable[[int], RankPool],
) -> None:
    if "host_memory" in options:
        options = options | {"nvme_path": str(tmp_path)}
    out = tmp_path / "out"
    ranks = ranks_of(world).run(export, family, options, str(out), dtype, mesh)
    model = FAMILIES[family].load(out)
    own = torch.float32 if "fp32" in (dtype, options["dtype"]) else torch.bfloat16
    masters = ranks[0]["masters"]
    plain = {name: p.detach() for name, p in model.named_parameters()}
    assert_same(plain, {name: masters[name].to(own) for name in plain})
    assert set(plain) == set(masters)
    for rank in ranks:
        assert_same(rank["masters"], masters)
        assert_same(rank["loaded"], {name: masters[name].to(own).float() for name in masters})
        assert_same(rank["state"], ranks[0]["state"])
    # Each byte was written by one rank, and each rank has written its part; replicas share chunks.
    total = sum(p.numel() * p.itemsize for p in plain.values())
    written = [rank["written"] for rank in ranks]
    shards = world if mesh is None else mesh[1]
    assert sum(written) == total
    assert all(each > 0 for each in written)
    assert max(written) < 1.5 * total / shards


def test_what_fails_on_one_rank_is_an_error_on_all(ranks2: RankPool, tmp_path: Path) -> None:
    first, second = ranks2.run(fail_on_one, str(tmp_path))
    steps = [
        ("StoreError: rank 1 could not write .*No space left", "StoreError: .*No space left"),
        (r"\[\]", r"\[\]"),
        (
            "CheckpointError: rank 1 could not write .*rank 1 does not see",
            "CheckpointError: rank 1 does not see",
        ),
        ("HeteroError: the exports differ between ranks", "the exports differ between ranks"),
        (r"\[\]", r"\[\]"),
        ("StoreError: rank 1 could not load .*No such file", "StoreError: .*No such file"),
        ("the folders of a .* differ between ranks", "the folders of a .* differ between ranks"),
        ("StoreError: rank 1 could not load .*No space left", "StoreError: .*No space left"),
        ("HeteroError: the model is half loaded", "HeteroError: the model is half loaded"),
        ("goes on: True", "goes on: True"),
    ]
    assert len(first) == len(second) == len(steps)
    for step, found in zip(steps, zip(first, second, strict=True), strict=True):
        for pattern, text in zip(step, found, strict=True):
            assert re.search(pattern, text, re.DOTALL), (pattern, text)
