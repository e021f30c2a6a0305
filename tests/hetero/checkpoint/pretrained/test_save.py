"""hetero.save_pretrained(): from_pretrained() reads the same bits; a failure leaves what was."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import hetero
from hetero.api import whole_state
from hetero.checkpoint.safetensors_header import read
from tests.support.checkpoint.exports import (
    POLICIES,
    WithBuffers,
    assert_same,
    managed,
    masters_of,
    options,
    step,
)
from tests.support.training import small_net
from tests.support.training.saved_models import FAMILIES, batches
from tests.zoo import pretrained as zoo

pytestmark = pytest.mark.usefixtures("nothing_left")


def files_of(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["gpt2-tied", "llama-untied", "mixtral-fused"])
def test_from_pretrained_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, policy: str, dtype: str
) -> None:
    monkeypatch.setattr(
        whole_state, "PART_NUMEL", 1000
    )  # so that tensors are written in several parts
    model, optimizer = managed(family, policy, tmp_path, dtype)
    step(model, optimizer)
    out = tmp_path / "out"
    hetero.save_pretrained(model, out, max_shard_bytes="150KB")
    again = FAMILIES[family].load(out)
    assert_same(again.state_dict(), model.state_dict())
    assert again.training is False
    model.eval()
    with torch.no_grad():
        found, expected = (m(input_ids=batches()[1]).logits for m in (again, model))
    assert torch.equal(found, expected)
    config = json.loads((out / "config.json").read_text())
    names = {"fp32": "float32", "bf16": "bfloat16"}
    assert config["architectures"] == [type(model).__name__]
    assert config.get("dtype", config.get("torch_dtype")) == names[dtype]
    assert (out / "generation_config.json").exists()
    optimizer.engine.close()


@pytest.mark.parametrize("name", ["t5", "mamba", "vit"])
def test_other_families_come_back(tmp_path: Path, name: str) -> None:
    torch.manual_seed(3)
    model = {**zoo.LANGUAGE_MODELS, "vit": zoo.vit}[name]()
    expected = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model, optimizer = hetero.initialize(
        model, hetero.HybridAdam(model.parameters()), placement_policy="cpu", dtype="fp32"
    )
    hetero.save_pretrained(model, tmp_path / "out")
    again: Any = type(model)
    assert_same(again.from_pretrained(tmp_path / "out").state_dict(), expected)
    optimizer.engine.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_masters_are_exported_as_they_are_and_rounded_once(tmp_path: Path, policy: str) -> None:
    torch.manual_seed(3)
    with hetero.ZeroInitContext(options(policy, tmp_path, "bf16")):
        model: Any = FAMILIES["llama-untied"].make(2)
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    optimizer = hetero.HybridAdam([p for p in model.parameters() if p is not frozen], lr=1e-2)
    model, optimizer = hetero.initialize(model, optimizer)
    step(model, optimizer)
    masters = masters_of(model)
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values())
    choices: list[tuple[Any, torch.dtype]] = [
        ("fp32", torch.float32),
        (torch.float16, torch.float16),
        (None, torch.bfloat16),
    ]
    for dtype, target in choices:
        hetero.save_pretrained(model, tmp_path / "out", dtype=dtype)
        found = tensors_of(tmp_path / "out")
        assert_same(found, {name: masters[name].to(target) for name in found})
        assert set(found) == set(masters)
    optimizer.engine.close()


def test_files_have_no_more_bytes_than_asked_for(tmp_path: Path) -> None:
    model, optimizer = managed("llama-untied", "cpu", tmp_path, "fp32")
    out, most = tmp_path / "out", 60_000
    hetero.save_pretrained(model, out, max_shard_bytes=most)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    count = len(files)
    assert [f.name for f in files] == [
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]
    where = {name: path.name for path in files for name in read(path).entries}
    assert index["weight_map"] == where
    assert set(where) == set(model.state_dict())
    sizes = {path.name: read(path).file_bytes - read(path).data_offset for path in files}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    large = [name for name, nbytes in sizes.items() if nbytes > most]
    assert len(large) == 2  # the embedding and the head, each alone
    assert all(list(where.values()).count(name) == 1 for name in large)
    # Files are full: what is first in one would not have fit in the one before.
    firsts = [next(iter(read(path).entries.values())).end for path in files]
    order = [sizes[path.name] for path in files]
    assert all(a + first > most for a, first in zip(order, firsts[1:], strict=False))
    for path in files:
        with safe_open(path, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    hetero.save_pretrained(model, out)
    assert set(files_of(out)) == {"config.json", "generation_config.json", "model.safetensors"}
    optimizer.engine.close()


def test_declared_ties_are_written_once_and_others_by_each_name(tmp_path: Path) -> None:
    model, optimizer = managed("gpt2-tied", "cpu", tmp_path, "fp32")
    hetero.save_pretrained(model, tmp_path / "gpt2")
    assert set(model.state_dict()) - set(tensors_of(tmp_path / "gpt2")) == {"lm_head.weight"}
    optimizer.engine.close()

    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    tied, optimizer = hetero.initialize(
        tied, hetero.HybridAdam(tied.parameters()), placement_policy="cpu", dtype="bf16"
    )
    hetero.save_pretrained(tied, tmp_path / "tied", dtype="fp32")
    found = tensors_of(tmp_path / "tied")
    masters = masters_of(tied)
    masters["1.weight"] = masters["0.weight"]
    assert_same(found, {name: masters[name] for name in found})
    assert set(found) == set(masters)
    # Another model, in which nothing is tied, has all that it needs.
    nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).load_state_dict(found)
    optimizer.engine.close()


def test_buffers_and_parameters_that_are_not_managed(tmp_path: Path) -> None:
    model = WithBuffers()
    model, optimizer = hetero.initialize(
        model, hetero.HybridAdam(model.parameters()), placement_policy="cpu", dtype="bf16"
    )
    hetero.save_pretrained(model, tmp_path / "out")
    found, expected = tensors_of(tmp_path / "out"), model.state_dict()
    assert "scratch" not in found
    assert_same({name: found[name] for name in expected}, dict(expected))
    assert set(files_of(tmp_path / "out")) == {"model.safetensors"}
    header = read(tmp_path / "out" / "model.safetensors")
    for entry in header.entries.values():
        assert (header.data_offset + entry.begin) % entry.dtype.itemsize == 0
    optimizer.engine.close()


def net(tmp_path: Path) -> tuple[Any, hetero.HybridAdam]:
    return small_net.managed({"placement_policy": "cpu"}, tmp_path)


def test_a_compiled_model_has_its_own_names(tmp_path: Path) -> None:
    model, optimizer = net(tmp_path)
    compiled = nn.Module()  # (what torch.compile() returns; importing its compiler takes a second)
    compiled._orig_mod = model
    hetero.save_pretrained(compiled, tmp_path / "out")
    assert set(tensors_of(tmp_path / "out")) == set(model.state_dict())
    optimizer.engine.close()


def test_training_goes_on_as_if_nothing_was_exported(tmp_path: Path) -> None:
    found = []
    for exports in (False, True):
        model, optimizer = managed("gpt2-tied", "nvme", tmp_path, "bf16")
        step(model, optimizer, 0)
        if exports:
            hetero.save_pretrained(model, tmp_path / "out", dtype="fp32")
            hetero.save_pretrained(model, tmp_path / "out")
        step(model, optimizer, 1)
        found.append(masters_of(model))
        optimizer.engine.close()
    assert_same(found[1], found[0])


# What is in the way


def test_an_earlier_export_and_an_empty_folder_are_replaced(tmp_path: Path) -> None:
    model, optimizer = net(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    hetero.save_pretrained(model, tmp_path / "link", max_shard_bytes=20_000)
    assert len(list((tmp_path / "empty").glob("*.safetensors"))) > 1
    small_net.train(model, optimizer)
    hetero.save_pretrained(model, str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert_same(dict(sorted(tensors_of(tmp_path / "empty").items())), sorted_state(model))
    assert list(files_of(tmp_path / "empty")) == ["model.safetensors"]
    hetero.save_pretrained(model, tmp_path / "a" / "b" / "c")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "empty", "link"]
    optimizer.engine.close()


def sorted_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(sorted(model.state_dict().items()))


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    model, optimizer = net(tmp_path)
    out = tmp_path / "out"
    weights = out / "model.safetensors"
    hetero.save_pretrained(model, out)

    def refused(message: str) -> None:
        before = files_of(out)
        with pytest.raises(ValueError, match=message):
            hetero.save_pretrained(model, out)
        assert files_of(out) == before
        assert os.listdir(tmp_path) == ["out"]

    (out / "tokenizer.json").write_text("{}")
    refused("tokenizer.json")
    (out / "tokenizer.json").unlink()
    save_file({"a": torch.zeros(3)}, weights, {"format": "pt"})
    refused("was not written by save_pretrained")
    weights.write_bytes(b"1")
    refused("is no earlier export")
    weights.unlink()
    (out / "config.json").write_text("{}")
    refused("files and no weights")
    optimizer.engine.close()


def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = net(tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is no folder"):
        hetero.save_pretrained(model, tmp_path / "file")
    with pytest.raises(ValueError, match="dtype must be one of"):
        hetero.save_pretrained(model, tmp_path / "out", dtype="int8")
    with pytest.raises(ValueError, match="size must be positive"):
        hetero.save_pretrained(model, tmp_path / "out", max_shard_bytes=0)
    with pytest.raises(hetero.UnmanagedParameterError):
        hetero.save_pretrained(nn.Linear(2, 2), tmp_path / "out")
    with pytest.raises(hetero.StoreError, match="cannot make a folder for the export"):
        hetero.save_pretrained(model, tmp_path / "file" / "out")
    with monkeypatch.context() as patched:
        patched.setattr(nn.Linear, "get_extra_state", lambda self: torch.zeros(3))
        with pytest.raises(ValueError, match=r"'first\._extra_state'"):
            hetero.save_pretrained(model, tmp_path / "out")
    assert os.listdir(tmp_path) == ["file"]
    optimizer.engine.close()
    with pytest.raises(hetero.ClosedError):
        hetero.save_pretrained(model, tmp_path / "out")


def test_adapters_are_left_to_peft(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = zoo.lora()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = hetero.initialize(
        model, hetero.HybridAdam(trained), placement_policy="cpu", dtype="fp32"
    )
    with pytest.raises(ValueError, match="adapters of PEFT"):
        hetero.save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    optimizer.engine.close()


# Failures


def failing(call: Callable[..., Any], error: int, after: int) -> Callable[..., Any]:
    """`call`, which fails after so many calls."""
    calls = iter(range(after))

    def limited(*args: Any) -> Any:
        if next(calls, None) is None:
            raise OSError(error, os.strerror(error))
        return call(*args)

    return limited


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize(
    ("name", "error", "after"),
    [("pwrite", errno.EIO, 5), ("fsync", errno.ENOSPC, 3)],
)
def test_a_failure_leaves_what_was_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exists: bool,
    name: str,
    error: int,
    after: int,
) -> None:
    model, optimizer = net(tmp_path)
    out = tmp_path / "out"
    if exists:
        hetero.save_pretrained(model, out)
    small_net.train(model, optimizer)
    before = files_of(out) if exists else {}
    with monkeypatch.context() as broken:
        broken.setattr(os, name, failing(getattr(os, name), error, after))
        with pytest.raises(hetero.StoreError, match=os.strerror(error)) as caught:
            hetero.save_pretrained(model, out, max_shard_bytes=20_000)
    assert caught.value.errno == error
    assert str(out) in str(caught.value)
    assert os.listdir(tmp_path) == (["out"] if exists else [])
    assert not exists or files_of(out) == before
    hetero.save_pretrained(model, out)
    assert_same(dict(sorted(tensors_of(out).items())), sorted_state(model))
    optimizer.engine.close()


def test_a_configuration_that_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    model, optimizer = managed("gpt2-tied", "cpu", tmp_path, "fp32")

    def refuse(path: Path) -> None:
        raise ValueError("not this one")

    model.generation_config.save_pretrained = refuse
    with pytest.raises(ValueError, match="not this one"):
        hetero.save_pretrained(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []
    optimizer.engine.close()
