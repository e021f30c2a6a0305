"""`hetero inspect` as its user meets it."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import hetero
from hetero.checkpoint.safetensors_header import read
from hetero.cli.checkpoints import by_module
from hetero.cli.main import main
from tests.support.cli_runs import Prints, Refuses, draw_nothing

pytestmark = pytest.mark.usefixtures("nothing_left")
Inspect = Callable[..., dict[str, Any]]


class Model(nn.Module):
    """Layers, a tied matrix and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(20))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        for layer in self.layers:
            y = y + 0.01 * layer(y)
        out: torch.Tensor = self.head(y)
        return out


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hetero checkpoint of step 1, in a folder of checkpoints."""
    path = tmp_path_factory.mktemp("run") / "step-1"
    model = Model()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.5},
    ]
    model, optimizer = hetero.initialize(
        model,
        hetero.HybridAdam(groups, lr=0.25),
        dtype="fp16",
        placement_policy="cpu",
        chunk_numel=4096,
        initial_loss_scale=64.0,
    )
    optimizer.backward(model(torch.arange(8)).float().square().mean())
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    extra = {"scheduler": scheduler, "epoch": 3, "seen": torch.arange(5)}
    hetero.save(path, model, optimizer, extra=extra)
    optimizer.engine.close()
    return path


@pytest.fixture
def inspect(prints: Prints) -> Inspect:
    """What `hetero inspect --json` says of a path."""

    def read(path: object, options: str = "") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(prints("inspect --json", str(path), options))
        return found

    return read


def test_a_hetero_checkpoint(saved: Path, inspect: Inspect) -> None:
    """By its own path, and as the latest one in its folder."""
    found = inspect(saved.parent)
    assert found == inspect(saved)
    assert (found["step"], found["ranks"], found["kind"]) == (1, 1, "hetero checkpoint")
    shapes = {name: (each["shape"], each["dtype"]) for name, each in found["params"].items()}
    expected = {n: (list(p.shape), "float32") for n, p in Model().named_parameters()}
    assert shapes == expected
    assert found["params"]["embed.weight"]["aliases"] == ["head.weight"]
    assert found["buffers"] == {"count": {"shape": [3], "dtype": "int64"}}
    (optimizer,) = found["optimizers"]
    assert (optimizer["name"], optimizer["states"]) == ("HybridAdam", ["exp_avg", "exp_avg_sq"])
    assert [group["params"] for group in optimizer["groups"]] == [21, 20]
    assert [group["options"]["lr"] for group in optimizer["groups"]] == [0.25, 0.5]
    assert found["loss_scale"]["value"] == 64.0
    assert set(found["extra"]) == {"scheduler", "epoch", "seen"}
    assert (found["extra"]["epoch"], found["extra"]["seen"]) == ("int", "tensor")
    assert found["files"] == {p.name: p.stat().st_size for p in saved.glob("*.safetensors")}


def test_its_page_is_short(saved: Path, prints: Prints) -> None:
    """Layers are one row, whatever their number."""
    out = prints("inspect", str(saved))
    numel = sum(p.numel() for p in Model().parameters())
    assert f"41 tensors, {numel:,} elements, float32" in out
    assert "embed.weight = head.weight" in out
    (row,) = [line for line in out.splitlines() if line.startswith("layers.*.weight")]
    assert row.split() == ["layers.*.weight", "20", "5,120", "float32"]
    assert "extra 'epoch'" in out
    assert len(out.splitlines()) < 40


def test_many_names_are_few_rows() -> None:
    names = [f"a{i}" for i in range(100)]
    rows = by_module(names)
    assert len(rows) == 12
    assert sum(map(len, rows.values())) == 100
    deep = [f"m{i % 3}.{j}.w{i}" for i in range(30) for j in range(4)]
    assert list(by_module(deep)) == ["m0.*", "m1.*", "m2.*"]


def test_verify_reads_every_byte(saved: Path, inspect: Inspect, prints: Prints) -> None:
    path = next(saved.glob("*.safetensors"))
    entries = read(path).entries.values()
    nbytes = sum(e.end - e.begin for e in entries if not e.name.startswith("padding@"))
    verified = inspect(saved, "--verify")["verified"]
    assert verified == {"verified_bytes": nbytes, "pieces": verified["pieces"], "damaged": []}
    assert f"verified: {nbytes} bytes" in prints("inspect --verify", str(saved))


def test_verify_names_all_that_is_damaged(
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    refuses: Refuses,
    prints: Prints,
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for each in saved.iterdir():
        (copy / each.name).write_bytes(each.read_bytes())
    path = next(copy.glob("*.safetensors"))
    header = read(path)
    hurt = ["model/layers.3.weight@0", "optimizer/layers.7.bias/exp_avg@0"]
    content = bytearray(path.read_bytes())
    for name in hurt:
        content[header.data_offset + header.entries[name].begin] ^= 1
    path.write_bytes(content)
    prints("inspect", str(copy))
    assert main(["inspect", str(copy), "--verify"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert {"model/layers.3.weight", "optimizer/layers.7.bias/exp_avg"} == {
        key.rpartition("@")[0] for key in hurt if any(key.rpartition("@")[0] in t for t in told)
    }
    os.truncate(path, 8192)
    refuses("has 8192 bytes", "inspect", str(copy), "--verify", code=1)


def test_a_folder_and_a_file_of_hugging_faces(
    tmp_path: Path, refuses: Refuses, inspect: Inspect
) -> None:
    tensors = {"a.0.w": torch.ones(2, 3), "a.1.w": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors | {"n": torch.arange(2)}, tmp_path / "model.safetensors")
    found = inspect(tmp_path)
    assert found["kind"] == "Hugging Face folder"
    assert {n: (p["shape"], p["dtype"]) for n, p in found["params"].items()} == {
        "a.0.w": ([2, 3], "float32"),
        "a.1.w": ([4], "bfloat16"),
    }
    assert found["buffers"] == {"n": {"shape": [2], "dtype": "int64"}}
    file = inspect(tmp_path / "model.safetensors")
    assert file["kind"] == "safetensors file"
    assert file["params"] == found["params"]
    refuses("has no checksums", "inspect", str(tmp_path), "--verify")


def test_a_dcp_checkpoint(tmp_path: Path, inspect: Inspect) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    params, state = get_state_dict(model, optimizer)
    dcp.save({"model": params, "optim": state, "seed": 7}, checkpoint_id=tmp_path / "dcp")
    found = inspect(tmp_path / "dcp")
    assert "DCP" in found["kind"]
    assert found["step"] == 1
    assert set(found["params"]) | set(found["buffers"]) == set(model.state_dict())
    assert found["optimizers"][0]["groups"][0]["options"]["lr"] == 0.125
    assert found["notes"] == ["1 entries are of neither a model nor an optimizer: seed"]


def test_a_universal_checkpoint_of_deepspeeds(
    tmp_path: Path, refuses: Refuses, inspect: Inspect
) -> None:
    for name in ("b.weight", "a.10.weight", "a.9.weight"):
        folder = tmp_path / "step7" / "zero" / name
        folder.mkdir(parents=True)
        for file in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"param": torch.ones(3, 2), "cat_dim": 0}, folder / f"{file}.pt")
        torch.save(torch.tensor(7.0), folder / "step.pt")
    found = inspect(tmp_path / "step7")
    assert found["kind"] == "DeepSpeed universal checkpoint"
    assert found["step"] == 7
    assert list(found["params"]) == ["a.9.weight", "a.10.weight", "b.weight"]
    assert len(found["files"]) == 9
    hostile = tmp_path / "step7" / "zero" / "b.weight" / "fp32.pt"
    torch.save({"param": _Hostile(tmp_path / "ran")}, hostile)
    refuses("names posix.mkdir, which is not loaded", "inspect", str(tmp_path / "step7"))
    assert not (tmp_path / "ran").exists()


class _Hostile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_nothing_of_a_pickle_is_run(tmp_path: Path, refuses: Refuses) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(pickle.dumps(_Hostile(tmp_path / "ran")))
    refuses("names posix.mkdir, which DCP does not write", "inspect", str(tmp_path / "bad"))
    assert not (tmp_path / "ran").exists()


def test_what_is_no_checkpoint(tmp_path: Path, refuses: Refuses) -> None:
    incomplete = tmp_path / ".step-9.incomplete"
    incomplete.mkdir()
    (incomplete / "rank-0000-of-0001.safetensors").write_bytes(struct.pack("<Q", 3))
    (tmp_path / "some.txt").write_text("text")
    for path, told in {
        incomplete: "is an incomplete checkpoint, with 8 bytes so far",
        tmp_path / "step-9": ".step-9.incomplete is next to it",
        tmp_path / "other": "there is no",
        tmp_path: "is no checkpoint: it has no manifest.json (hetero)",
        tmp_path / "some.txt": "is a file, and no .safetensors",
    }.items():
        refuses("hetero inspect: error: ", "inspect", str(path))
        refuses(told, "inspect", str(path))


def test_a_run_without_checkpoints_has_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: Prints
) -> None:
    """As the tutorial's first run: `inspect` and `convert` take its folder."""
    draw_nothing(monkeypatch)
    monkeypatch.chdir(tmp_path)
    shape = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 256}
    Path("small.json").write_text(json.dumps({"model_type": "gpt2", **shape}))
    short = "--max-steps 1 --seq-len 8 --batch-size 1 --run-dir runs/first"
    prints("train --model small.json --policy cpu --json", short)
    assert "runs/first/model" in prints("inspect runs/first")
    prints("convert runs/first exported --to hf --dtype bf16")
    assert Path("exported/model.safetensors").is_file()
