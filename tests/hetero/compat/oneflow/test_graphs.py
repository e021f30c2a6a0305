"""hetero/compat/oneflow: graphs, their configuration, global modules and tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.compat import oneflow as flow
from tests.support.training.small_net import Net, assert_same, trained

P, B, S0 = flow.placement("cpu", ranks=[0]), flow.sbp.broadcast, flow.sbp.split(0)


class Training(flow.nn.Graph):
    """A step on a net under seed 0."""

    def __init__(self, setting: Callable[[Any], object] = lambda config: None, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = flow.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.add_optimizer(self.optimizer, **more)
        setting(self.config)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        output = self.model(x)
        (output.float() - 1).square().mean().backward()
        return output


class Mine(flow.nn.Module):
    """A user's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = flow.nn.Linear(2, 2)


def data(seed: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))


def test_a_graph_trains(nothing_left: None) -> None:
    """The document's test has the other stages."""
    graph = Training(lambda config: config.enable_zero())
    for seed in range(3):
        assert graph(data(seed)).shape == (4, 64)
    assert_same(graph.model, trained([[0], [1], [2]]))
    assert graph.optimizer.engine.config.zero_stage == 2


def test_micro_batches_and_a_scheduler() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = flow.optim.AdamW(model.parameters(), lr=1e-2)

    class Accumulating(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            self.add_optimizer(optimizer, lr_sch=rates)

        def build(self, x: torch.Tensor) -> Any:
            for part in x.tensor_split(2):
                ((self.model(part) - 1).square().mean() / 2).backward()

    graph = Accumulating()
    for seed in range(2):
        graph(data(seed))
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 4
    assert_same(model, trained([[0], [1]], rates=[1e-2, 5e-3]))


def test_two_graphs_of_one_model(nothing_left: None) -> None:
    """The second finds the engine of the first; and inference needs no graph."""
    graph = Training()
    other = type("Other", (Training,), {"__init__": lambda self: flow.nn.Graph.__init__(self)})()
    other.model, other.optimizer = graph.model, graph.optimizer
    other.add_optimizer(graph.optimizer)
    graph(data(0))
    engine = graph.optimizer.engine
    other(data(1))
    assert graph.optimizer.engine is engine

    class Inference(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = graph.model

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    inferred = Inference()(data(2))
    assert not inferred.requires_grad
    assert torch.equal(inferred, graph.model(data(2)))


def test_several_modules_of_a_graph() -> None:
    class Two(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.loss = flow.nn.Linear(4, 4), flow.nn.MSELoss()
            self.last = flow.nn.Linear(4, 2)
            params = [*self.first.parameters(), *self.last.parameters()]
            self.optimizer = flow.optim.SGD(params, lr=0.1)
            self.add_optimizer(self.optimizer)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.loss(self.last(self.first(x)), torch.zeros(3, 2))
            loss.backward()
            return loss.detach()

    graph = Two()
    losses = [float(graph(torch.ones(3, 4))) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_options(tmp_path: Path) -> None:
    def setting(config: Any) -> None:
        config.enable_amp(True)
        config.set_hetero_options(placement_policy="nvme", nvme_path=str(tmp_path))
        config.set_hetero_options(host_memory="1MiB")

    graph = Training(setting)
    graph(data(0))
    config = graph.optimizer.engine.config
    assert (config.dtype, config.placement_policy) == ("bf16", "nvme")
    assert config.host_memory == 1 << 20


def test_modules_and_tensors_may_be_global() -> None:
    model = flow.nn.Sequential(flow.nn.Linear(2, 2), flow.nn.ReLU())
    assert isinstance(model, torch.nn.Sequential)
    assert model.to("cuda").cuda().to_global(placement=P, sbp=B) is model
    assert model[0].weight.device.type == "cpu"
    assert model.to(torch.float64)[0].weight.dtype == torch.float64
    assert type(pickle.loads(pickle.dumps(model))) is type(model)
    assert issubclass(Mine, torch.nn.Module)
    assert flow.nn.functional is torch.nn.functional
    x = flow.randn(3, 2, device="cuda").to("cuda")
    mine = x.to_global(placement=P, sbp=S0)
    assert type(mine) is torch.Tensor
    assert torch.equal(mine, x)
    assert flow.ones(2, dtype=flow.int64).to(device="cuda").dtype == torch.int64
    assert flow.nn.CrossEntropyLoss()(torch.zeros(3, 4), torch.ones(3, 1, dtype=torch.int64)) > 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: Mine().to_global(placement=P, sbp=S0),
            ValueError,
            "splits dimension 0: .* a model is broadcast",
        ),
        (
            lambda: Mine().to_global(placement=flow.placement("cpu", ranks=[0, 1]), sbp=B),
            ValueError,
            "has the ranks .0, 1., not all 1 ranks",
        ),
        (
            lambda: flow.randn(2, 2).to_global(placement=P, sbp=flow.sbp.split(1)),
            ValueError,
            "splits dimension 1: data may be split along dimension 0",
        ),
        (lambda: Training(lambda c: c.enable_zero(stage=4)), ValueError, "zero_stage must be one"),
        (
            lambda: Training(lambda c: c.set_gradient_accumulation_steps(2)),
            ValueError,
            "may call backward.. for each part of the data",
        ),
        (lambda: Training(lambda c: c.enable_zeros()), ValueError, "did you mean enable_zero"),
        (
            lambda: Training(lambda c: c.enable_xla_jit(True)),
            ValueError,
            r"call torch\.compile",
        ),
        (
            lambda: Training(lambda c: c.set_hetero_options(host_memry=1)),
            ValueError,
            "did you mean host_memory",
        ),
        (
            lambda: flow.nn.Graph().add_optimizer(torch.optim.RMSprop([torch.zeros(1)])),
            ValueError,
            "not RMSprop",
        ),
        (lambda: Training(is_sparse=True), TypeError, "'is_sparse'"),
        (lambda: (g := Training()).add_optimizer(g.optimizer), ValueError, "has an optimizer"),
        (lambda: flow.nn.Graph()(), NotImplementedError, "needs build"),
        (lambda: flow.nn.Nothing, AttributeError, "Nothing"),
        (lambda: flow.nothing, AttributeError, "nothing"),
    ],
)
def test_what_cannot_be_is_refused(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_graph_without_a_module() -> None:
    class Empty(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.add_optimizer(flow.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))

    with pytest.raises(ValueError, match="is not one of this model's managed parameters"):
        Empty()()


def test_what_is_not_needed_is_named(not_needed: Callable[[], list[str]]) -> None:
    config = flow.nn.Graph().config
    config.enable_zero(shard_min_size=1, shard_restore_level=0)
    config.allow_fuse_add_to_output(True)
    config.set_zero_redundancy_optimizer_min_size_after_split(1)
    config.enable_xla_jit(False)
    config.set_zero_redundancy_optimizer_mode()
    config.enable_amp(dtype=torch.float16)
    Mine().to("cuda")
    flow.optim.SGD([torch.nn.Parameter(torch.zeros(1))], contiguous_params=True)
    assert not_needed() == [
        "nn.Graph.config: shard_min_size",
        "nn.Graph.config: shard_restore_level",
        "nn.Graph.config: allow_fuse_add_to_output",
        "nn.Graph.config: set_zero_redundancy_optimizer_min_size_after_split",
        "enable_amp: dtype",
        "to: device",
        "SGD: contiguous_params",
    ]
