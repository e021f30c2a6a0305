"""`hetero convert`: what one program saved, another one loads with the same bits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import GPT2Config, GPT2LMHeadModel

import hetero
from hetero.checkpoint import formats
from hetero.checkpoint.hetero_checkpoint import HeteroCheckpoint
from hetero.cli.main import main
from offload.errors import CheckpointError
from tests.hetero.checkpoint.dcp.test_save_load import masters
from tests.support.cli_runs import Refuses

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

CONFIG = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}


def gpt(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(**CONFIG, bos_token_id=0, eos_token_id=0))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.25},
        {"params": [p for p in model.parameters() if p.ndim < 2]},
    ]


def managed(seed: int) -> tuple[nn.Module, hetero.HybridAdam]:
    model = gpt(seed)
    optimizer = hetero.HybridAdam(groups_of(model), lr=0.01 + seed)
    made: tuple[nn.Module, hetero.HybridAdam] = hetero.initialize(
        model, optimizer, dtype="bf16", placement_policy="cpu"
    )
    return made


def step(model: nn.Module, optimizer: Any, times: int = 2) -> None:
    for number in range(times):
        ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(number))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def states(optimizer: Any) -> list[torch.Tensor]:
    found = optimizer.state_dict()["state"].values()
    return [s[name] for s in found for name in ("exp_avg", "exp_avg_sq", "step")]


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert set(found) == set(wanted)
        found = [found[name] for name in wanted]
        wanted = list(wanted.values())
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hetero checkpoint, `hetero`; and what it has, `masters` and `states`."""
    path = tmp_path_factory.mktemp("saved")
    model, optimizer = managed(0)
    step(model, optimizer)
    hetero.save(path / "hetero", model, optimizer, extra={"epoch": 3})
    torch.save({"masters": masters(model), "states": states(optimizer)}, path / "wanted")
    optimizer.engine.close()
    return path


@pytest.fixture
def wanted(saved: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(saved / "wanted")
    return found


def convert(source: Path, target: Path, to: str, *options: str) -> None:
    assert main(["convert", str(source), str(target), "--to", to, *options]) == 0


def test_to_dcp_and_back(
    saved: Path, wanted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain torch loads it on the way, and hetero goes on from what comes back."""
    convert(saved / "hetero", tmp_path / "dcp", "dcp")
    assert "random numbers and extra are not in" in capsys.readouterr().err
    model = gpt(5)
    optimizer = torch.optim.AdamW(groups_of(model), lr=7.0)
    params, state = get_state_dict(model, optimizer)
    found = {"model": params, "optim": state}
    dcp.load(found, checkpoint_id=tmp_path / "dcp")
    set_state_dict(model, optimizer, model_state_dict=params, optim_state_dict=found["optim"])
    assert_same(masters(model), wanted["masters"])
    assert_same(states(optimizer), wanted["states"])
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.25, 0.0]
    convert(tmp_path / "dcp", tmp_path / "back", "hetero")
    again, loaded = managed(1)
    before = torch.get_rng_state()
    made = hetero.load(tmp_path / "back", again, loaded)
    assert torch.equal(torch.get_rng_state(), before)
    assert (made.step, dict(made.extra)) == (2, {})
    assert_same(masters(again), wanted["masters"])
    assert_same(states(loaded), wanted["states"])
    assert [g["lr"] for g in loaded.param_groups] == [0.01, 0.01]
    assert main(["inspect", str(tmp_path / "back"), "--verify"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "dcp"]


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_to_hugging_faces(
    saved: Path,
    wanted: dict[str, Any],
    tmp_path: Path,
    dtype: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """from_pretrained() reads it, tied names and all; masters are rounded to the dtype."""
    gpt(0).config.save_pretrained(tmp_path / "config")
    options = [] if dtype is None else ["--dtype", dtype]
    given = ("--model-config", str(tmp_path / "config"), *options)
    convert(saved / "hetero", tmp_path / "hf", "hf", *given)
    assert "config.json" not in capsys.readouterr().err
    torch_dtype = torch.float32 if dtype is None else torch.bfloat16
    model, info = GPT2LMHeadModel.from_pretrained(
        tmp_path / "hf", dtype=torch_dtype, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    found = {name: p.detach() for name, p in model.named_parameters()}
    assert_same(found, {n: m.to(torch_dtype) for n, m in wanted["masters"].items()})
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_several_files_have_an_index(
    saved: Path,
    wanted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hetero.checkpoint import formats

    monkeypatch.setattr(formats, "_MOST_BYTES", 40_000)
    convert(saved / "hetero", tmp_path / "hf", "hf")
    assert (
        "has no config.json, as from_pretrained() needs: --model-config" in capsys.readouterr().err
    )
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found = {}
    for path in files:
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert set(index["weight_map"]) == set(found)
    assert_same(found, wanted["masters"])
    # and back, from the several files
    convert(tmp_path / "hf", tmp_path / "own", "hetero")
    model, _ = managed(1)
    hetero.load(tmp_path / "own", model)
    assert_same(masters(model), wanted["masters"])


def test_from_hugging_faces(tmp_path: Path) -> None:
    """Parameters alone: hetero loads them without the optimizer, and torch's DCP, too."""
    model = gpt(3).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "own", "hetero")
    made, optimizer = managed(0)
    hetero.load(tmp_path / "own", made)
    assert_same(masters(made), masters(model))
    with pytest.raises(ValueError, match="without any, parameters alone are loaded"):
        hetero.load(tmp_path / "own", made, optimizer)
    convert(tmp_path / "hf", tmp_path / "dcp", "dcp", "--dtype", "fp32")
    found = {"model": {n: torch.empty_like(t) for n, t in masters(model).items()}}
    dcp.load(found, checkpoint_id=tmp_path / "dcp")
    assert_same(found["model"], masters(model))


def universal(path: Path, names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """A universal checkpoint of step 7, as DeepSpeed writes it; of step 7."""
    torch.manual_seed(11)
    shapes = {name: tuple(p.shape) for name, p in gpt(0).named_parameters()}
    found = {}
    for name in names:
        folder = path / "zero" / name
        folder.mkdir(parents=True)
        files = {f: torch.rand(shapes[name]) for f in ("fp32", "exp_avg", "exp_avg_sq")}
        for file, tensor in files.items():
            torch.save({"param": tensor, "cat_dim": 0}, folder / f"{file}.pt")
        torch.save(torch.tensor(7.0), folder / "step.pt")
        found[name] = files
    return found


def test_from_deepspeeds_universal_format(tmp_path: Path) -> None:
    """Masters, states and steps; the optimizer keeps its options, which are not there."""
    names = [name for name, _ in gpt(0).named_parameters()]
    found = universal(tmp_path / "ds", names)
    convert(tmp_path / "ds", tmp_path / "own", "hetero")
    model = gpt(1)
    made, optimizer = hetero.initialize(
        model, hetero.HybridAdam(model.parameters(), lr=0.5), dtype="bf16", placement_policy="cpu"
    )
    assert hetero.load(tmp_path / "own", made, optimizer).step == 7
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert_same(masters(made), {name: files["fp32"] for name, files in found.items()})
    for state, files in zip(states_by_param(optimizer), found.values(), strict=True):
        assert torch.equal(state["exp_avg"], files["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], files["exp_avg_sq"])
        assert state["step"] == 7
    convert(tmp_path / "ds", tmp_path / "hf", "hf")
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        for name, files in found.items():
            assert torch.equal(file.get_tensor(name), files["fp32"])


NAME = "transformer.wte.weight"


def test_a_tensor_of_one_element_that_is_there_often(tmp_path: Path) -> None:
    """A file of a kilobyte is no tensor of 256 GiB: nothing of it is written."""
    universal(tmp_path / "ds", [NAME])
    file = tmp_path / "ds" / "zero" / NAME / "fp32.pt"
    torch.save({"param": torch.ones(1).expand(2**36)}, file)
    with pytest.raises(CheckpointError, match=r"fp32\.pt has a tensor of shape \(68719476736,\)"):
        formats.convert(tmp_path / "ds", tmp_path / "own", "hetero")
    assert [each.name for each in tmp_path.iterdir()] == ["ds"]


def states_by_param(optimizer: Any) -> list[dict[str, torch.Tensor]]:
    return list(optimizer.state_dict()["state"].values())


def test_odd_tensors(tmp_path: Path) -> None:
    """Scalars, empty ones, whole numbers; and tensors of several parts."""
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "count": torch.arange(5),
        "flags": torch.tensor([True, False]),
        "large": torch.rand(1025, 1031),
        "bf16": torch.rand(7, 5).bfloat16(),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "own", "hetero")
    convert(tmp_path / "own", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "own-again", "hetero")
    convert(tmp_path / "own-again", tmp_path / "hf", "hf")
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert_same(found, tensors)
    assert all(found[name].dtype is tensors[name].dtype for name in tensors)
    loaded = {"model": {name: torch.empty_like(t) for name, t in tensors.items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert_same(loaded["model"], tensors)


def test_a_part_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing asks a hetero checkpoint for more."""
    save_file({"large": torch.rand(3, 1 << 20)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "own", "hetero")
    asked = []
    values = HeteroCheckpoint.values

    def note(self: HeteroCheckpoint, order: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
        for key, begin, found in values(self, order):
            asked.append(len(found))
            yield key, begin, found

    monkeypatch.setattr(HeteroCheckpoint, "values", note)
    for to in ("hf", "dcp", "hetero"):
        convert(tmp_path / "own", tmp_path / to[1:] / "made", to)
        assert asked == [1 << 20] * 3
        asked.clear()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Path]:
    save_file({"w": torch.rand(4, 4)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "own", "hetero")
    yield tmp_path
    assert not list(tmp_path.glob(".*"))


def test_what_is_there_is_not_replaced(two: Path, refuses: Refuses) -> None:
    (two / "there").mkdir()
    (two / "file").write_text("text")
    for name in ("there", "file", "own"):
        refuses("is there already", f"convert {two}/a.safetensors {two}/{name} --to hf")
    assert list((two / "there").iterdir()) == []


def test_a_damaged_source_leaves_nothing(two: Path, refuses: Refuses) -> None:
    file = next((two / "own").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-4096] ^= 1
    file.write_bytes(content)
    for to in ("hf", "dcp", "hetero"):
        refuses("are damaged", f"convert {two}/own {two}/new --to {to}")
        assert not (two / "new").exists()


def test_what_cannot_be_written_leaves_nothing(
    two: Path, monkeypatch: pytest.MonkeyPatch, refuses: Refuses
) -> None:
    """Because of options, and of a full disk."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    new = f"convert {two}/own {two}/new"
    refuses("config goes with to='hf'", new, f"--to dcp --model-config {two}/own")
    refuses("config.json is no file", new, f"--to hf --model-config {two}")
    with pytest.raises(ValueError, match="must be one of hetero, hf, dcp"):
        formats.convert(two / "own", two / "new", "gguf")
    monkeypatch.setattr(os, "fsync", full)
    refuses("No space left", new, "--to hf")
    assert not (two / "new").exists()
