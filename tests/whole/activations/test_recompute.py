"""recompute: the same bits whatever is computed again, in every placement, and over ranks."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import GPT2LMHeadModel

from offload.errors import BudgetError, StaleGraphError
from offload.memory.tiers import Account, Tier
from tests.support.ranks.processes import RankPool
from tests.support.recompute import Stack, latest, plain_grads, recomputing_steps
from tests.support.training.loops import Run, batches, build, tiny_gpt2, train

pytestmark = pytest.mark.usefixtures("nothing_left")

SETTINGS = [
    {"placement_policy": "cpu"},
    {"placement_policy": "nvme", "host_memory": "2MiB"},
    {"placement_policy": "nvme", "backend": "emulated", "device_memory": "3MiB"},
]
MODES: list[Any] = ["none", "all", "auto", ["transformer.h.1", "*.h.2"], ["*.mlp"]]


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    """tiny_gpt2() without a cache of keys and values, and with dropout."""
    model = tiny_gpt2()
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    return model


def made(path: Path | None, mode: Any, **options: Any) -> tuple[Any, Any]:
    """A GPT-2 with little room for activations, of which a forward saves some 1.2 MiB."""
    given = {"activation_memory": "300KiB", "chunk_numel": 4096, "recompute": mode} | options
    if path is not None:
        given["nvme_path"] = str(path)
    make = functools.partial(gpt2, given.pop("dropout", 0.0))
    return build(make, **given)


@functools.cache
def reference(accumulate: int = 1, dropout: float = 0.0) -> Run:
    model, optimizer = build(
        functools.partial(gpt2, dropout), placement_policy="cpu", chunk_numel=4096
    )
    torch.manual_seed(1)
    return train(model, optimizer, batches(4), accumulate, clip=1.0)


def trained(model: Any, optimizer: Any, accumulate: int = 1) -> Run:
    torch.manual_seed(1)
    return train(model, optimizer, batches(4), accumulate, clip=1.0)


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        *((SETTINGS[0], mode) for mode in MODES),
        (SETTINGS[1], "all"),
        (SETTINGS[2], "auto"),
    ],
    ids=str,
)
def test_the_same_bits(settings: dict[str, Any], mode: Any, tmp_path: Path) -> None:
    """With two micro-batches and dropout."""
    model, optimizer = made(tmp_path, mode, dropout=0.1, **settings)
    engine = optimizer.engine
    run = trained(model, optimizer, 2)
    assert run.same_bits(reference(2, 0.1))
    assert set(engine.ledger.in_use_bytes.values()) == {0}
    if mode == "none":
        assert engine.watch.words() == ""
    else:
        again = latest(engine).recomputed
        assert len(again) == (2 if mode == MODES[3] else 3)
        assert mode != "all" or all(again)


def test_beside_updates(tmp_path: Path) -> None:
    settings = {
        "placement_policy": "nvme",
        "host_memory": "2MiB",
        "debug": {"overlap_updates": "both"},
    }
    model, optimizer = made(tmp_path, "all", **settings)
    assert trained(model, optimizer).same_bits(reference())


def test_without_nvme_less_room_is_enough() -> None:
    """Where nothing can leave, what does not fit is computed again, and no more than that."""
    small = {"placement_policy": "cpu", "activation_memory": "600KiB"}
    model, optimizer = made(None, "none", **small)
    tokens = batches(1)[0]
    with pytest.raises(BudgetError, match="activation_memory, 600.0 KiB"):
        model(input_ids=tokens, labels=tokens)
    optimizer.engine.close()
    model, optimizer = made(None, "auto", **small)
    assert trained(model, optimizer).same_bits(reference())
    assert 0 < sum(latest(optimizer.engine).recomputed) < 3
    model, optimizer = made(None, "auto", placement_policy="cpu", activation_memory="4MiB")
    assert trained(model, optimizer).same_bits(reference())
    assert latest(optimizer.engine).recomputed == [False] * 3
    assert not optimizer.engine.watch.activations.recomputes


def test_bytes_of_all() -> None:
    """From the second forward on blocks save their inputs, and nothing else."""
    peaks = {}
    for mode in ("none", "all"):
        torch.manual_seed(0)
        options = {"placement_policy": "cpu", "activation_memory": "64MiB", "dtype": "fp32"}
        model, optimizer = build(lambda: Stack(4), recompute=mode, **options)
        x = torch.randn(32, 64)
        ledger, peak = optimizer.engine.ledger, 0
        for _ in range(2):
            loss = model(x).sum()
            peak = ledger.used(Tier.HOST, Account.ACTIVATION)
            loss.backward()
        peaks[mode] = peak
        optimizer.engine.close()
    inputs = 4 * x.nbytes
    assert peaks["all"] == inputs
    assert peaks["none"] > 2 * inputs


def test_written_bytes(tmp_path: Path) -> None:
    written = {}
    for mode in ("none", "all"):
        model, optimizer = made(tmp_path, mode, placement_policy="cpu")
        engine = optimizer.engine
        trained(model, optimizer)
        written[mode] = engine.traffic.activations_written
    assert 0 < written["all"] < written["none"] / 2


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.extra), 3])
def test_two_ranks(ranks2: RankPool, stage: int, tmp_path: Path) -> None:
    """They compute the same calls again, and in stage 3 all uses come to be as the agreed order
    has them."""
    options = {"zero_stage": stage, "placement_policy": "nvme", "nvme_path": str(tmp_path)}
    options |= {"host_memory": "6MiB", "activation_memory": "64KiB"}
    none, auto, every = (
        ranks2.run(recomputing_steps, options | {"recompute": mode})
        for mode in ("none", "auto", "all")
    )
    for found in (auto, every):
        for (expected, *_), (values, *_) in zip(none, found, strict=True):
            assert all(map(torch.equal, values, expected))
        assert found[0][1] == found[1][1]
    for _, again, deviations in every:
        assert again[-1] == [True] * 4
        assert stage == 1 or deviations[-2:] == [0, 0]


def of_transformers(kind: str) -> Any:
    """A model of two or three blocks with dropout as its configuration has it."""
    small = {"num_attention_heads": 2, "vocab_size": 301, "hidden_size": 32}
    causal = small | {"intermediate_size": 64, "num_hidden_layers": 3, "num_key_value_heads": 2}
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**causal))
    if kind == "mixtral":
        config = transformers.MixtralConfig(num_local_experts=4, **causal)
        return transformers.MixtralForCausalLM(config)
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2, vocab_size=301
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "t5"])
def test_transformers(kind: str, tmp_path: Path) -> None:
    """Experts inside of blocks, and two stacks that share biases of positions."""

    def make() -> Any:
        model = of_transformers(kind)
        for module in model.modules():  # a decoder has a configuration of its own
            if hasattr(module, "config"):
                module.config.use_cache = False
        return model

    runs = []
    for mode in ("none", "all"):
        options = {"activation_memory": "8MiB", "nvme_path": str(tmp_path), "host_memory": "32MiB"}
        model, optimizer = build(make, recompute=mode, placement_policy="nvme", **options)
        torch.manual_seed(1)
        runs.append(train(model, optimizer, batches(3), clip=1.0))
    again = latest(optimizer.engine).recomputed
    assert again == [True] * (6 if kind == "t5" else 3)
    assert runs[0].same_bits(runs[1])


# What surrounds a call


def stack(mode: Any = "all", **options: Any) -> tuple[Any, Any]:
    make = options.pop("make", lambda: Stack(3))
    given = {"placement_policy": "cpu", "activation_memory": "64MiB", "dtype": "fp32"}
    return build(make, recompute=mode, **given | options)


def warmed(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """The first call of a kind is never computed again."""
    model(x).sum().backward()
    optimizer.zero_grad()


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))


def grads(model: Any) -> list[torch.Tensor]:
    return [param.grad.clone() for param in model.parameters()]


def test_two_forwards_before_their_backwards() -> None:
    model, optimizer = stack()
    warmed(model, optimizer, X)
    losses = [model(X).sum(), model(2 * X).sum()]
    with torch.no_grad():
        model(X)
    for loss in losses:
        loss.backward()
    expected = plain_grads(lambda: Stack(3), lambda m: m(X).sum() + m(2 * X).sum())
    torch.testing.assert_close(grads(model), expected)
    optimizer.engine.close()


def test_eval_between_forward_and_backward() -> None:
    """Dropout is what it was in forward."""
    model, optimizer = stack(make=lambda: Stack(3, dropout=0.5))
    warmed(model, optimizer, X)
    torch.manual_seed(3)
    loss = model(X).sum()
    model.eval()
    loss.backward()
    assert not any(module.training for module in model.modules())

    def plain(model: Any) -> torch.Tensor:
        torch.manual_seed(3)
        return model(X).sum()

    expected = plain_grads(lambda: Stack(3, dropout=0.5), plain)
    assert all(map(torch.equal, grads(model), expected))
    optimizer.engine.close()


def test_a_step_between_forward_and_backward() -> None:
    model, optimizer = stack()
    warmed(model, optimizer, X)
    first, second = model(X).sum(), model(X).sum()
    first.backward()
    optimizer.step()
    with pytest.raises(StaleGraphError, match=r"blocks\.\d is to be computed again"):
        second.backward()
    optimizer.engine.close()


def test_an_exception_in_a_block() -> None:
    for error in (ValueError, KeyboardInterrupt):
        model, optimizer = stack()
        warmed(model, optimizer, X)
        engine = optimizer.engine
        before = latest(engine)

        def fail(module: Any, args: Any, error: Any = error) -> None:
            raise error("on purpose")

        hook = model.blocks[1].inner.register_forward_pre_hook(fail)
        with pytest.raises(error, match="on purpose"):
            model(X)
        hook.remove()
        model(X).sum().backward()
        expected = plain_grads(lambda: Stack(3), lambda m: m(X).sum())
        assert all(map(torch.equal, grads(model), expected))
        optimizer.step()
        assert len(latest(engine).costs) == 3
        assert before is not latest(engine)
        engine.close()


def test_second_derivatives() -> None:
    def penalty(model: Any) -> torch.Tensor:
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    model, optimizer = stack()
    warmed(model, optimizer, X)
    penalty(model).backward()
    assert all(latest(optimizer.engine).recomputed)
    expected = plain_grads(lambda: Stack(3), penalty)
    assert all(map(torch.equal, grads(model), expected))
    optimizer.engine.close()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_inside_a_checkpoint(reentrant: bool, whole: bool, tmp_path: Path) -> None:
    """The user's own is enough; a module with parameters between it and the blocks changes nothing
    about that."""
    model, optimizer = stack(
        placement_policy="nvme", nvme_path=str(tmp_path), host_memory="80MiB", chunk_numel=4096
    )
    warmed(model, optimizer, X)
    x = X.clone().requires_grad_()
    if whole:
        loss = checkpoint(model, x, use_reentrant=reentrant).sum()
    else:
        model.outer_checkpoint = reentrant
        loss = model(x).sum()
    loss.backward()
    expected = plain_grads(lambda: Stack(3), lambda m: m(X).sum())
    assert all(map(torch.equal, grads(model), expected))
    optimizer.engine.close()


def test_a_cache_of_keys_and_values(tmp_path: Path) -> None:
    """It grows in each call, so calls are not made again, and a note says what to do."""
    model, optimizer = made(tmp_path, "all", placement_policy="cpu")
    model.config.use_cache = True
    engine = optimizer.engine
    assert trained(model, optimizer).same_bits(reference())
    assert sum(latest(engine).recomputed) == 0
    assert sum("use_cache = False" in note for note in engine.notes) == 1


def test_copies_are_plain(tmp_path: Path) -> None:
    model, optimizer = stack()
    warmed(model, optimizer, X)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(module._compiled_call_impl is None for module in other.modules())
        assert torch.equal(other(X), model(X))
    torch.save(model, tmp_path / "model.pt")
    blocks = list(model.blocks)
    assert all(block._compiled_call_impl is not None for block in blocks)
    optimizer.engine.close()
    assert all(block._compiled_call_impl is None for block in blocks)


@pytest.mark.parametrize("when", ["before", "after", "whole"])
def test_torch_compile(when: str) -> None:
    """Compiled blocks are computed again; of a compiled model graphs are left as they are."""

    def compiled(model: torch.nn.Module) -> Any:
        if when == "whole":
            return torch.compile(model, backend="eager")
        for block in model.blocks:
            block.compile(backend="eager")
        return model

    def made_stack() -> torch.nn.Module:
        return compiled(Stack(3)) if when == "before" else Stack(3)

    model, optimizer = stack(make=made_stack)
    called = model if when == "before" else compiled(model)
    for _ in range(2):
        optimizer.zero_grad()
        called(X).sum().backward()
    if when != "whole":
        assert latest(optimizer.engine).recomputed == [True] * 3
    expected = plain_grads(lambda: Stack(3), lambda m: m(X).sum())
    torch.testing.assert_close(grads(model), expected)
    optimizer.engine.close()
    torch.compiler.reset()


def test_functional_call() -> None:
    """The parameters that such a call is given are gone in backward."""
    model, optimizer = stack()
    warmed(model, optimizer, X)
    given = {n: (2 * p.detach()).requires_grad_() for n, p in model.named_parameters()}
    torch.func.functional_call(model, given, (X,)).sum().backward()
    torch.manual_seed(0)
    plain = Stack(3)
    same = {n: (2 * p.detach()).requires_grad_() for n, p in plain.named_parameters()}
    torch.func.functional_call(plain, same, (X,)).sum().backward()
    for name, tensor in given.items():
        assert torch.equal(tensor.grad, same[name].grad), name
    optimizer.engine.close()


def test_refused_without_a_budget() -> None:
    with pytest.raises(ValueError, match="recompute='all' .*activation_memory"):
        build(lambda: Stack(3), placement_policy="cpu", recompute="all")
    with pytest.raises(ValueError, match=r"no module has a name like 'block\.\*'; the nearest is"):
        stack(["block.*"])


def test_explain() -> None:
    model, optimizer = stack("auto", activation_memory="1MiB")
    engine = optimizer.engine
    assert "No call of a block was seen yet" in engine.explain()
    for _ in range(4):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "Of 3 calls of blocks 0 are computed again in backward" in engine.explain()
    engine.close()
