"""hetero/compat/fsdp: FSDP2's loop on the engine, beside FSDP2 itself and plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.compat import fsdp
from hetero.compat.fsdp import (
    METHODS,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from tests.support.compat.document import run_document
from tests.support.compat.fsdp import Layer, Model, data, train
from tests.support.ranks.processes import RankPool

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def sharded(**keywords: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, **keywords)
    return fully_shard(model, **keywords)


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    return (model(data(0, step)).float() - 1).square().mean()


def steps(model: nn.Module, optimizer: Any) -> None:
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def expected(**options: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options))
    return model


def assert_same(model: nn.Module, wanted: nn.Module) -> None:
    masters = hetero.masters(model.parameters())
    for found, weight in zip(masters, wanted.parameters(), strict=True):
        torch.testing.assert_close(found, weight.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "reshard", "mesh", "factor"),
    [
        ("float32", True, True, 0.5),
        ("bfloat16", False, False, None),
    ],
)
def test_two_ranks_beside_fsdp2(
    dtype: str, reshard: bool, mesh: bool, factor: float | None, ranks2: RankPool
) -> None:
    theirs = ranks2.run(train, True, dtype, reshard, mesh, factor)
    ours = ranks2.run(train, False, dtype, reshard, mesh, factor)
    for (found, norms), (wanted, expected_norms) in zip(ours, theirs, strict=True):
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for mine, weight in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, weight, rtol=1e-5, atol=1e-6)


def test_the_tutorials_loop(nothing_left: None) -> None:
    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(11, 16)
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embedding(x)
            for layer in self.layers:
                x = layer(x)
            return x

    sizes = {"epochs": 2, "vocab_size": 11, "batch_size": 2, "seq_len": 4, "max_norm": 1.0}
    names = run_document(
        "fsdp2_tutorial.txt",
        {
            "from torch.distributed.fsdp import fully_shard, FSDPModule, MixedPrecisionPolicy": (
                "from hetero.compat.fsdp import fully_shard, FSDPModule, MixedPrecisionPolicy"
            ),
            "from torch import optim": "from hetero.compat.fsdp import optim",
        },
        {"torch": torch, "Transformer": Transformer, "device": "cpu", **sizes},
    )
    config = names["optim"].engine.config
    assert (config.dtype, config.grad_dtype, config.reduce_dtype) == ("bf16", "fp32", "fp32")
    assert config.zero_stage == 3
    assert all(m.step == 2 for m in names["optim"].engine.params.in_order())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: fsdp.optim.AdamW(p, lr=1e-2),
        lambda p: hetero.HybridAdam(p, lr=1e-2, weight_decay=1e-2),
    ],
)
def test_the_first_forward_initializes(make: Callable[..., Any], nothing_left: None) -> None:
    model = sharded(offload_policy=CPUOffloadPolicy(), chunk_numel=4096)
    optimizer = make(model.parameters())
    with torch.no_grad():
        model(data(0, 0))  # as it was made
    with pytest.raises(hetero.UnmanagedParameterError):
        _ = optimizer.engine
    steps(model, optimizer)
    config = optimizer.engine.config
    assert (config.placement_policy, config.chunk_numel) == ("cpu", 4096)
    assert optimizer.engine.lifetime.is_of(model)
    assert_same(model, expected(weight_decay=1e-2))


def test_a_model_on_the_meta_device(nothing_left: None) -> None:
    with torch.device("meta"):
        model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.load_state_dict(Model().state_dict())
    optimizer = fsdp.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer)
    assert_same(model, expected())


def test_some_modules_keep_fp32() -> None:
    torch.manual_seed(0)
    model = Model()
    whole = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer.norm, mp_policy=whole)
        fully_shard(layer, mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    seen: list[Any] = []
    model.layers[0].norm.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    optimizer = fsdp.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model).backward()
    optimizer.step()
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    for name, dtype in dtypes.items():
        assert dtype == (torch.float32 if ".norm." in name else torch.bfloat16)
    assert seen == [torch.float32]


def test_gradients_that_are_not_sent_yet() -> None:
    model = sharded()
    optimizer = fsdp.optim.AdamW(model.parameters(), lr=1e-2)
    for micro in range(2):
        said_to = model if micro else model.layers[0]  # any module says it of the whole model
        said_to.set_requires_gradient_sync(micro == 1)  # (first before there is an engine)
        loss_of(model, micro).backward()
        intake = optimizer.engine.steps.grad_intake
        assert bool(intake._unsynced) == (micro == 0)
    optimizer.step()
    with pytest.raises(ValueError, match="it is for whole models"):
        model.set_requires_gradient_sync(True, recurse=False)
    torch.manual_seed(0)
    wanted = Model()
    adamw = torch.optim.AdamW(wanted.parameters(), lr=1e-2)
    (loss_of(wanted, 0) + loss_of(wanted, 1)).backward()
    adamw.step()
    assert_same(model, wanted)


def by_layers(model: Any, step: int) -> torch.Tensor:
    """A loss whose forward calls the layers themselves, with checkpoints."""
    x = model.first(data(0, step))
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return (model.last(x) - 1).square().mean()


def part_first(model: Any, step: int) -> torch.Tensor:
    """A loss of a layer alone, before the first of the whole model."""
    part = model.layers[0](torch.ones(2, 16)).square().mean()
    return part if step == 0 else part + loss_of(model, step)


@pytest.mark.parametrize("loss", [by_layers, part_first])
def test_a_part_may_be_called_first(loss: Any, nothing_left: None) -> None:
    model = sharded()
    torch.manual_seed(0)
    wanted = Model()
    optimizer = fsdp.optim.AdamW(model.parameters(), lr=1e-2)
    adamw = torch.optim.AdamW(wanted.parameters(), lr=1e-2)
    for step in range(3):
        for each, update in ((model, optimizer), (wanted, adamw)):
            update.zero_grad()
            loss(each, step).backward()
            update.step()
    assert optimizer.engine.lifetime.is_of(model)
    assert_same(model, wanted)


def test_what_was_said_of_the_whole_model_holds_if_a_part_is_called_first() -> None:
    model = sharded()
    optimizer = fsdp.optim.AdamW(model.parameters(), lr=1e-2)
    model.set_requires_gradient_sync(False)
    part_first(model, 0).backward()
    assert optimizer.engine.steps.grad_intake._unsynced
    model.set_requires_gradient_sync(True)


def test_parts_alone_are_refused() -> None:
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    optimizer = fsdp.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match=r"outside of the fully sharded FSDPLayer.*on the whole"):
        loss_of(model)
    del optimizer


def test_two_optimizers() -> None:
    model = sharded()
    first = fsdp.optim.SGD(model.first.parameters(), lr=1e-2)
    rest = [p for name, p in model.named_parameters() if not name.startswith("first")]
    second = fsdp.optim.AdamW(rest, lr=1e-2)
    loss_of(model).backward()
    for optimizer in (first, second):
        optimizer.step()
        assert optimizer.engine is first.engine


def test_slices_are_plain() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), fully_shard(nn.Linear(2, 2))))
    first = model[:2]
    assert type(first) is nn.Sequential
    assert first[0] is model[0]
    assert first(torch.ones(2)).shape == (2,)
    assert isinstance(model[2:][0], FSDPModule)


def test_what_is_not_needed_is_named(not_needed: Callable[[], list[str]]) -> None:
    model = Model()
    assert fully_shard([model.first, model.last], reshard_after_forward=2) is not None
    fully_shard(model, shard_placement_fn=lambda param: None)
    handle = model.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    assert model.unshard() is None
    model.reshard()
    model.set_modules_to_forward_prefetch([model.first])
    fsdp.share_comm_ctx([model])
    assert not_needed() == [
        "fully_shard: a number as reshard_after_forward",
        "fully_shard: shard_placement_fn",
        "FSDPModule: unshard",
        "FSDPModule: reshard",
        "FSDPModule: set_modules_to_forward_prefetch",
        "share_comm_ctx",
    ]
    with pytest.raises(AttributeError, match="set_modules_to_forward_prefetc'"):
        model.set_modules_to_forward_prefetc([])


def test_every_method_of_fsdp2_has_its_treatment() -> None:
    theirs = [
        name
        for name, value in vars(torch.distributed.fsdp.FSDPModule).items()
        if not name.startswith("_") and callable(value)
    ]
    assert set(theirs) <= set(METHODS.keys)
    model = fully_shard(Model())
    for name in ("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(ValueError, match=f"FSDPModule: {name}=.* is refused"):
            getattr(model, name)(lambda tensor: None)
    with pytest.raises(ValueError, match=r"set_reduce_scatter_unused_params=True is refused"):
        model.set_reduce_scatter_unused_params(True)
    model.set_reduce_scatter_unused_params(False)
    for name in set(torch.distributed.fsdp._fully_shard.__all__) - {"DataParallelMeshDims"}:
        assert hasattr(fsdp, name)


class Tied(nn.Module):
    """A norm in fp32 beside an embedding and a head of one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x)))

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)


def tied(**more: Any) -> tuple[Tied, Any]:
    model = Tied()
    whole = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    fully_shard(model.norm, mp_policy=whole)
    fully_shard(model, mp_policy=BF16, **more)
    return model, fsdp.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("policy", ["cpu", "nvme"])
def test_a_state_dict_has_the_masters(policy: str, tmp_path: Path, nothing_left: None) -> None:
    model, optimizer = tied(placement_policy=policy, nvme_path=str(tmp_path))
    for _ in range(2):
        model(torch.arange(8)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = dict(
        zip(
            [name for name, _ in model.named_parameters()],
            hetero.masters(model.parameters()),
            strict=True,
        )
    )
    assert not torch.equal(
        masters["embedding.weight"], masters["embedding.weight"].bfloat16().float()
    )
    state = model.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    for name, master in masters.items():
        assert torch.equal(state[name], master)
    assert state["head.weight"] is state["embedding.weight"]
    again = model.state_dict()
    assert again["head.weight"] is not state["head.weight"]
    assert torch.equal(model.head.state_dict()["weight"], masters["embedding.weight"])
    assert model.state_dict(keep_vars=True)["head.weight"] is model.head.weight
    model.load_state_dict({name: value.clone() for name, value in state.items()})
    for found, master in zip(hetero.masters(model.parameters()), masters.values(), strict=True):
        assert torch.equal(found, master)
    plain = copy.deepcopy(model).state_dict()
    assert plain["head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("full", "source", "early"),
    [
        (False, "torch", True),
        (False, "hetero", False),
        (True, "torch", False),
        (True, "hetero", False),
    ],
)
def test_states_by_torchs_functions(full: bool, source: str, early: bool) -> None:
    """set_optimizer_state_dict() names parameters as the model does, and makes no step."""
    options = StateDictOptions(full_state_dict=full)

    def trained(shards: bool, steps: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Model()
        if shards:
            fully_shard(model)
        made = (fsdp.optim if shards else torch.optim).AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            loss_of(model, step).backward()
            made.step()
            made.zero_grad()
        return model, made

    giver, optimizer = trained(source == "hetero", 2)
    state = get_optimizer_state_dict(giver, optimizer, options=options)
    model, other = trained(True, 0 if early else 1)
    if full and (early or source == "torch"):  # torch's function compares with a local state
        with pytest.raises((AssertionError, KeyError)):
            set_optimizer_state_dict(model, other, state, options=options)
        return
    set_optimizer_state_dict(model, other, state, options=options)
    model.load_state_dict(giver.state_dict())
    if early:
        loss_of(model).backward()
    found, wanted = (each.state_dict()["state"] for each in (other, optimizer))
    assert found.keys() == wanted.keys()
    for key, expected_state in wanted.items():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found[key][name], expected_state[name])
    for each in (other, optimizer):
        if isinstance(each, hetero.HybridOptimizer):
            each.engine.close()


def test_another_method_is_a_forward() -> None:
    model, optimizer = tied()
    fsdp.register_fsdp_forward_method(model, "twice")
    fsdp.register_fsdp_forward_method(nn.Linear(2, 2), "nothing")
    with pytest.raises(ValueError, match="FSDPTied has no method 'thrice'"):
        fsdp.register_fsdp_forward_method(model, "thrice")
    out = model.twice(torch.arange(8))
    assert out.dtype == torch.bfloat16
    assert optimizer.engine.lifetime.is_of(model)
    out.float().square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        out = model.twice(torch.arange(8))
        plain = copy.deepcopy(model)
        assert type(plain) is Tied
        assert plain.twice.args[0] is plain


@pytest.mark.parametrize(
    ("shard", "error", "message"),
    [
        (
            lambda m: fully_shard(m, ignored_params={m.first.weight}),
            ValueError,
            "ignored_params=.*freeze them",
        ),
        (lambda m: fully_shard(m, dp_mesh_dims=1), ValueError, "mesh of one or two dimensions"),
        (lambda m: fully_shard(fully_shard(m)), ValueError, "on this FSDPModel before"),
        (
            lambda m: fully_shard(m, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False)),
            ValueError,
            "cast_forward_inputs=False",
        ),
        (
            lambda m: (fully_shard(m.layers, mp_policy=BF16), fully_shard(m)),
            ValueError,
            "param_dtype of layers is bf16, and that of the whole model fp32",
        ),
        (
            lambda m: (fully_shard(m.layers, reshard_after_forward=False), fully_shard(m)),
            ValueError,
            "reshard_after_forward differs between the whole model and layers",
        ),
        (lambda m: fully_shard(m, host_memry=1), ValueError, "did you mean host_memory"),
        (
            lambda m: fully_shard(m, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64)),
            ValueError,
            "param_dtype must be a dtype of 16 or 32 bits",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    shard: Callable[[Model], Any], error: type[Exception], message: str
) -> None:
    model = Model()
    with pytest.raises(error, match=message):
        shard(model)
        optimizer = fsdp.optim.AdamW(model.parameters())
        loss_of(model)
        del optimizer


def test_a_forward_without_optimizer() -> None:
    model = sharded()
    with pytest.raises(hetero.HeteroError, match="needs its optimizer"):
        loss_of(model)
    model.eval()
    assert loss_of(model).requires_grad  # the plain module's
