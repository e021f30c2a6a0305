"""hetero.load_pretrained(): values come as they are in the folder; what does not fit is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

import hetero
from hetero.api import whole_state
from hetero.checkpoint.pretrained.safetensors_checkpoint import INDEX_NAME
from tests.support.checkpoint.exports import (
    POLICIES,
    WithBuffers,
    assert_same,
    managed,
    masters_of,
    options,
    step,
)
from tests.support.checkpoint.small_trainings import PLACES, build, steps
from tests.support.training import small_net
from tests.support.training.saved_models import FAMILIES, batches
from tests.support.training.small_net import EMULATED, SETTINGS, Net

pytestmark = pytest.mark.usefixtures("nothing_left")

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors are read in several parts."""
    monkeypatch.setattr(whole_state, "PART_NUMEL", 1024)


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Masters and buffers, copies."""
    return masters_of(model) | {name: b.clone() for name, b in model.named_buffers()}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["gpt2-tied", "llama-untied"])
def test_a_folder_of_transformers_gives_the_same_logits(
    tmp_path: Path, family: str, policy: str, dtype: str
) -> None:
    folder = tmp_path / "theirs"
    FAMILIES[family].save(folder, layers=2)
    plain = FAMILIES[family].load(folder, dtype=TORCH[dtype])
    model, optimizer = managed(family, policy, tmp_path, dtype)
    step(model, optimizer)
    found = hetero.load_pretrained(model, folder)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert_same(model.state_dict(), plain.state_dict())
    model.eval()
    with torch.no_grad():
        logits, expected = (m(input_ids=batches()[0]).logits for m in (model, plain))
    assert torch.equal(logits, expected)
    # Masters have all bits of the folder, also those that parameters lack.
    exact = FAMILIES[family].load(folder, dtype=torch.float32)
    assert_same(masters_of(model), dict(exact.named_parameters()))
    optimizer.engine.close()


def train(model: nn.Module, optimizer: hetero.HybridAdam) -> None:
    """A step, under fp16 with a scaled loss."""
    optimizer.zero_grad()
    optimizer.backward(small_net.loss_of(model))
    optimizer.step()


@pytest.mark.covering(1)
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("settings", [*SETTINGS, EMULATED])
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_values_become_masters_unrounded(
    tmp_path: Path, settings: dict[str, object], compute: str, dtype: str
) -> None:
    torch.manual_seed(5)
    values = {n: p.detach().to(getattr(torch, dtype)) for n, p in Net().named_parameters()}
    save_file(values, tmp_path / "one.safetensors")
    model, optimizer = small_net.managed(settings, tmp_path, compute)
    train(model, optimizer)
    hetero.load_pretrained(model, tmp_path / "one.safetensors")
    assert_same(masters_of(model), {name: value.float() for name, value in values.items()})
    own = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    assert_same(model.state_dict(), {n: v.float().to(own) for n, v in values.items()})
    hetero.save_pretrained(model, tmp_path / "out", dtype="fp32")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_same({name: found[name] for name in values}, masters_of(model))
    train(model, optimizer)
    small_net.assert_nothing_is_used(optimizer)
    optimizer.engine.close()


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
def test_the_states_of_the_optimizer_stay(tmp_path: Path, state_dtype: str) -> None:
    model, optimizer = build(PLACES["cpu"], tmp_path, state_dtype=state_dtype)
    steps(model, optimizer, range(2))

    def states() -> list[torch.Tensor]:
        kept = optimizer.state_dict()["state"]
        names = sorted({*next(iter(kept.values()))} - {"master"})
        return [kept[number][name] for number in kept for name in names]

    before = states()
    # (Of few bits: one on a tie would be moved by a unit, as there is no bit for the carry.)
    values = {n: torch.rand_like(p).bfloat16().float() for n, p in Net().named_parameters()}
    save_file(values | {"mean": torch.rand(3)}, tmp_path / "a.safetensors")
    hetero.load_pretrained(model, tmp_path / "a.safetensors")
    assert_same(masters_of(model), values)
    assert all(map(torch.equal, states(), before))
    optimizer.engine.close()


# Names


def test_the_prefix_of_a_base_model_is_added_and_removed(tmp_path: Path) -> None:
    config = hf.GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=16, vocab_size=64)
    torch.manual_seed(0)
    base, head = hf.GPT2Model(config), hf.GPT2LMHeadModel(config)
    base.save_pretrained(tmp_path / "base")
    head.save_pretrained(tmp_path / "head")
    for folder, source, make in (("base", base, hf.GPT2LMHeadModel), ("head", head, hf.GPT2Model)):
        model: Any = make(config)
        model, optimizer = hetero.initialize(
            model, hetero.HybridAdam(model.parameters()), placement_policy="cpu", dtype="fp32"
        )
        hetero.load_pretrained(model, tmp_path / folder)
        found = {n.removeprefix("transformer."): t for n, t in masters_of(model).items()}
        expected = {
            n.removeprefix("transformer."): p.detach() for n, p in source.named_parameters()
        }
        assert_same(found, expected)
        optimizer.engine.close()


class Prefixed(nn.Module):
    """A base model "base" with a head, and what it says of names."""

    base_model_prefix = "base"
    _keys_to_ignore_on_load_unexpected = (r"\.old$",)
    _keys_to_ignore_on_load_missing = (r"^later",)

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.later = nn.Linear(4, 4, bias=False)
        self.head.weight = self.base.weight


def prefixed(**more: Any) -> tuple[Any, hetero.HybridAdam]:
    torch.manual_seed(1)
    model = Prefixed()
    return hetero.initialize(
        model, hetero.HybridAdam(model.parameters()), placement_policy="cpu", dtype="fp32", **more
    )


def test_what_may_be_missing_or_left_over_is_passed_over(tmp_path: Path) -> None:
    model, optimizer = prefixed()
    later = masters_of(model)["later.weight"]
    values = {"weight": torch.rand(4, 4), "bias": torch.rand(4), "x.old": torch.rand(1)}
    save_file(values, tmp_path / "a.safetensors")
    found = hetero.load_pretrained(model, tmp_path / "a.safetensors")
    assert found == ([], [])
    expected = {"base.weight": values["weight"], "base.bias": values["bias"], "later.weight": later}
    assert_same(masters_of(model), expected)
    optimizer.engine.close()


def test_an_exact_name_comes_before_one_with_a_prefix(tmp_path: Path) -> None:
    model, optimizer = prefixed()
    values = {"base.weight": torch.rand(4, 4), "base.bias": torch.rand(4), "bias": torch.rand(4)}
    save_file(values, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"1 only in the checkpoint:\n    bias: \(4,\)"):
        hetero.load_pretrained(model, tmp_path / "a.safetensors")
    found = hetero.load_pretrained(model, tmp_path / "a.safetensors", strict=False)
    assert found == ([], ["bias"])
    assert torch.equal(masters_of(model)["base.bias"], values["base.bias"])
    optimizer.engine.close()


def test_tied_names_may_be_absent_and_must_not_contradict_each_other(tmp_path: Path) -> None:
    model, optimizer = prefixed()
    one, other, bias = torch.rand(4, 4), torch.rand(4, 4), torch.rand(4)
    for number, values in enumerate(
        (
            {"head.weight": one},
            {"base.weight": other},
            {"base.weight": one, "head.weight": one.clone()},
        )
    ):
        save_file(values | {"base.bias": bias}, tmp_path / f"{number}.safetensors")
        assert hetero.load_pretrained(model, tmp_path / f"{number}.safetensors") == ([], [])
        assert torch.equal(masters_of(model)["base.weight"], next(iter(values.values())))
    before = snapshot(model)
    for values in (
        {"base.weight": one, "head.weight": other, "base.bias": bias},
        {"base.weight": one, "head.weight": one.double(), "base.bias": bias},
    ):
        save_file(values, tmp_path / "wrong.safetensors")
        with pytest.raises(ValueError, match="'base.weight' and 'head.weight' are one tensor"):
            hetero.load_pretrained(model, tmp_path / "wrong.safetensors")
    assert_same(snapshot(model), before)
    optimizer.engine.close()


@pytest.mark.parametrize("strict", [True, False])
def test_what_does_not_fit_is_listed_and_nothing_is_changed(tmp_path: Path, strict: bool) -> None:
    model, optimizer = small_net.managed({"placement_policy": "cpu"}, tmp_path)
    before = snapshot(model)
    values = {name: torch.rand_like(p) for name, p in Net().named_parameters()}
    values["first.weight"] = torch.rand(64, 63)
    values["scale"] = torch.ones(1, dtype=torch.int64)
    del values["last.bias"]
    values |= {f"more.{i}": torch.rand(2, 3) for i in range(30)}
    save_file(values, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="does not fit the model; nothing is changed") as caught:
        hetero.load_pretrained(model, tmp_path / "a.safetensors", strict=strict)
    text = str(caught.value)
    assert "first.weight: (64, 63) in the checkpoint, (64, 64) in the model" in text
    assert "scale: torch.int64 in the checkpoint, torch.float32 in the model" in text
    assert ("1 only in the model:\n    last.bias: (64,)" in text) == strict
    assert ("30 only in the checkpoint:\n    more." in text) == strict
    assert ("and 10 more" in text) == strict
    assert "from_pretrained() inside hetero.ZeroInitContext" in text
    assert_same(snapshot(model), before)
    optimizer.engine.close()


def test_without_strict_the_rest_is_loaded_and_named(tmp_path: Path) -> None:
    model, optimizer = small_net.managed({"placement_policy": "cpu"}, tmp_path)
    before = masters_of(model)
    save_file({"scale": torch.full((1,), 7.0), "x": torch.rand(2)}, tmp_path / "a.safetensors")
    found = hetero.load_pretrained(model, tmp_path / "a.safetensors", strict=False)
    assert found.unexpected_keys == ["x"]
    assert found.missing_keys == [name for name in before if name != "scale"]
    assert_same(masters_of(model), before | {"scale": torch.full((1,), 7.0)})
    optimizer.engine.close()


def test_fused_experts_of_a_folder_are_refused_with_a_way_out(tmp_path: Path) -> None:
    config = hf.MixtralConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        vocab_size=64,
    )
    names = {"model.layers.0.block_sparse_moe.experts.0.w1.weight": torch.rand(32, 32)}
    save_file(names, tmp_path / "a.safetensors")
    model: Any = hf.MixtralForCausalLM(config)
    model, optimizer = hetero.initialize(
        model, hetero.HybridAdam(model.parameters()), placement_policy="cpu", dtype="fp32"
    )
    with pytest.raises(ValueError, match=r"only in the check.*\n.*experts\.0\.w1(.|\n)*inside"):
        hetero.load_pretrained(model, tmp_path / "a.safetensors")
    optimizer.engine.close()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("policy", POLICIES)
def test_buffers_and_frozen_and_other_parameters(tmp_path: Path, policy: str) -> None:
    torch.manual_seed(0)
    theirs = WithBuffers()
    theirs.net(torch.rand(4, 8))  # running statistics
    theirs.number.data.add_(5)
    values = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    save_file(values, tmp_path / "a.safetensors")
    model = WithBuffers()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = hetero.initialize(
        model, hetero.HybridAdam(trained), **options(policy, tmp_path, "bf16")
    )
    turned = model.turned
    assert hetero.load_pretrained(model, tmp_path / "a.safetensors") == ([], [])
    own = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert_same(dict(model.state_dict()), {name: values[name].to(own[name]) for name in own})
    assert own["frozen"] == torch.bfloat16
    assert own["net.1.num_batches_tracked"] == own["number"] == torch.int64
    assert model.turned is turned
    optimizer.engine.close()


# Folders that are not as they should be


def net_folder(tmp_path: Path) -> tuple[Any, hetero.HybridAdam, Path]:
    """A managed net and a folder of three files that fits it."""
    model, optimizer = small_net.managed({"placement_policy": "cpu"}, tmp_path)
    hetero.save_pretrained(model, tmp_path / "out", max_shard_bytes=16_700)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    return model, optimizer, tmp_path / "out"


def spoil_index(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / INDEX_NAME
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def with_file(name: str) -> Callable[[Path], None]:
    return lambda folder: spoil_index(folder, lambda i: {"weight_map": {"scale": name}})


def cut_off(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)


def copy_twice(folder: Path) -> None:
    first, second, _ = sorted(folder.glob("*.safetensors"))
    shutil.copy(first, second)


def point_elsewhere(folder: Path) -> None:
    first, second, _ = sorted(folder.glob("*.safetensors"))
    name = next(iter(load_file(first)))
    spoil_index(folder, lambda i: {"weight_map": i["weight_map"] | {name: second.name}})


DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: shutil.rmtree(folder), "No such file"),
    (lambda folder: [p.unlink() for p in folder.iterdir()], "has neither model.safetensors"),
    (lambda folder: min(folder.glob("*.safetensors")).unlink(), "No such file"),
    (cut_off, "is no whole safetensors file"),
    (copy_twice, "both have"),
    (point_elsewhere, "and it is not"),
    (with_file("../out/model-00001-of-00003.safetensors"), "no file's name"),
    (with_file("a\0"), "no file's name"),
    (lambda folder: spoil_index(folder, lambda i: []), "must be an object"),
    (lambda folder: spoil_index(folder, lambda i: {"weight_map": {"a": 1}}), "a string"),
    (lambda folder: (folder / INDEX_NAME).write_text("[" * 100_000), "is damaged: it is no JSON"),
]


def test_a_damaged_folder_is_an_error_and_nothing_is_changed(tmp_path: Path) -> None:
    model, optimizer, good = net_folder(tmp_path)
    small_net.train(model, optimizer)
    before = snapshot(model)
    for number, (spoil, message) in enumerate(DAMAGE):
        folder = shutil.copytree(good, tmp_path / f"{number}")
        spoil(folder)
        with pytest.raises((hetero.CheckpointError, hetero.StoreError), match=message):
            hetero.load_pretrained(model, folder)
        assert_same(snapshot(model), before)
    optimizer.engine.close()


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_read_that_fails_late_is_an_error_and_loading_again_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    model, optimizer = small_net.managed(settings, tmp_path)
    values = {name: torch.rand_like(p) for name, p in Net().named_parameters()}
    save_file(values, tmp_path / "a.safetensors")
    preadv = os.preadv
    for what, expected, message in (
        (lambda: 0, hetero.CheckpointError, "ends at byte"),
        (lambda: os.close(-1), hetero.StoreError, "Bad file descriptor"),
    ):
        calls = iter(range(3))

        def limited(*args: Any, what: Any = what, calls: Any = calls) -> int:
            return what() if next(calls, None) is None else preadv(*args)

        with monkeypatch.context() as broken:
            broken.setattr(os, "preadv", limited)
            with pytest.raises(expected, match=message):
                hetero.load_pretrained(model, tmp_path / "a.safetensors")
        save_file({"scale": values["scale"]}, tmp_path / "part.safetensors")
        for _ in range(2):  # what is loaded into a part does not mend the rest
            with pytest.raises(hetero.HeteroError, match="half loaded from .*safetensors"):
                small_net.train(model, optimizer)
            hetero.load_pretrained(model, tmp_path / "part.safetensors", strict=False)
        hetero.load_pretrained(model, tmp_path / "a.safetensors")
        assert_same(masters_of(model), values)
    optimizer.engine.close()


def test_a_short_read_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, folder = net_folder(tmp_path)
    expected = snapshot(model)
    small_net.train(model, optimizer)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:1000]], at))
    hetero.load_pretrained(model, folder)
    assert_same(snapshot(model), expected)
    optimizer.engine.close()


def test_only_managed_models_that_are_open(tmp_path: Path) -> None:
    model, optimizer, folder = net_folder(tmp_path)
    with pytest.raises(hetero.UnmanagedParameterError):
        hetero.load_pretrained(Net(), folder)
    optimizer.engine.close()
    with pytest.raises(hetero.ClosedError):
        hetero.load_pretrained(model, folder)
