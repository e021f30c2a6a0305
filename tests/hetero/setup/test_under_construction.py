"""Parameters inside ZeroInitContext, and after it until initialize(), compared with plain ones."""

from __future__ import annotations

import copy
import io
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import hetero
from hetero.setup.init_context import ZeroInitContext
from hetero.stand_ins.offloaded_tensor import OffloadedTensor

WIDTH = 64
MATRIX_BYTES = WIDTH * WIDTH * 4


def tight(path: Path, matrices: float = 2.5) -> ZeroInitContext:
    """A context whose budget holds so many matrices."""
    return hetero.ZeroInitContext(
        placement_policy="nvme",
        dtype="fp32",
        nvme_path=str(path),
        host_memory=int(matrices * MATRIX_BYTES),
    )


def layers(number: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number)))


def built(path: Path) -> tuple[nn.Sequential, nn.Sequential, ZeroInitContext]:
    """The same model plain, and under construction with most of it offloaded."""
    plain = layers()
    with tight(path) as context:
        model = layers()
    assert context.construction.any_offloaded
    return plain, model, context


def built_to_train(path: Path) -> tuple[nn.Sequential, nn.Sequential, ZeroInitContext]:
    """As built(), with the first parameters offloaded, and a budget that training can do with."""
    plain = layers(48)
    with tight(path, 37.5) as context:
        model = layers(48)
    assert all(context.construction.is_offloaded(model[i].weight) for i in range(6))
    return plain, model, context


def check_trained(model: nn.Module, plain: nn.Module) -> None:
    """initialize() takes the values that the model has now."""
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    assert all(map(torch.equal, hetero.masters(model.parameters()), plain.parameters()))
    optimizer.engine.close()


def peak(context: ZeroInitContext) -> int:
    return context.construction.ledger.peak_bytes["host"]


def offloaded(model: nn.Module, context: ZeroInitContext) -> list[nn.Parameter]:
    return [p for p in model.parameters() if context.construction.is_offloaded(p)]


class TestDeepCopies:
    def test_copies_stay_in_the_budget_and_have_their_values(self, tmp_path: Path) -> None:
        def make() -> list[nn.Linear]:
            torch.manual_seed(0)
            first, layer = nn.Linear(8, 1024), nn.Linear(1024, 1024)
            return [first, *(copy.deepcopy(layer) for _ in range(16))]

        with hetero.ZeroInitContext(
            placement_policy="nvme", nvme_path=str(tmp_path), host_memory="16MiB"
        ) as context:
            made = make()
        ledger = context.construction.ledger
        assert ledger.peak_bytes["host"] <= 16 << 20
        assert ledger.in_use_bytes["disk"] > 40 << 20
        for mine, plain in zip(made, make(), strict=True):
            assert torch.equal(mine.weight, plain.weight)
            assert torch.equal(mine.bias, plain.bias)

    def test_a_model_of_copies_alone_is_trained_with_the_options(self) -> None:
        with hetero.ZeroInitContext(placement_policy="cpu", dtype="fp32"):
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
        assert optimizer.engine.config.placement_policy == "cpu"
        assert optimizer.engine.config.dtype == "fp32"
        optimizer.engine.close()

    def test_a_copy_that_does_not_fit_says_so(self) -> None:
        with (
            pytest.raises(hetero.BudgetError, match=r"copying a parameter of shape \(64, 64\)"),
            hetero.ZeroInitContext(placement_policy="cpu", host_memory=MATRIX_BYTES + 1),
        ):
            copy.deepcopy(nn.Linear(WIDTH, WIDTH, bias=False))


class TestInsideTheBlock:
    def test_parameters_in_ram_are_plain(self) -> None:
        with hetero.ZeroInitContext(placement_policy="cpu"):
            assert type(nn.Linear(4, 4).weight) is nn.Parameter

    def test_a_parameter_that_shares_an_offloaded_one(self, tmp_path: Path) -> None:
        with tight(tmp_path) as context:
            model = layers()
            absent = offloaded(model, context)
            for source in (absent[0], absent[1].data):
                twin = nn.Embedding.from_pretrained(source, freeze=False)
                with torch.no_grad():
                    twin.weight[3].fill_(5.0)
                assert torch.equal(source[3], torch.full((WIDTH,), 5.0))
                del twin, source

    def test_a_graph_keeps_what_it_has_saved(self, tmp_path: Path) -> None:
        """An elementwise product saves the parameter itself, not a view of its memory."""
        with tight(tmp_path) as context:
            scale = nn.Linear(WIDTH, WIDTH, bias=False)
            given = torch.ones(WIDTH, WIDTH, requires_grad=True)
            loss = (given * scale.weight).sum()
            others = layers(4)
            assert context.construction.any_offloaded
            loss.backward()
            assert torch.equal(given.grad, scale.weight.detach())
            del others

    def test_other_threads_read_values(self, tmp_path: Path) -> None:
        plain = layers()
        found: list[bool] = []
        with tight(tmp_path):
            model = layers()

            def read() -> None:
                for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    found.append(torch.equal(mine, theirs))

            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
        assert found == [True] * 6


class TestRefusals:
    """They name the least host_memory that is known while the model is built."""

    def test_with_a_file_it_is_the_largest_parameter(self, tmp_path: Path) -> None:
        with (
            pytest.raises(
                hetero.BudgetError,
                match=rf"building Linear\.weight.*largest parameter.*{MATRIX_BYTES} bytes",
            ),
            tight(tmp_path, 0.5),
        ):
            layers()

    def test_without_one_it_is_all_that_is_built(self) -> None:
        with (
            pytest.raises(hetero.BudgetError, match=rf"{3 * MATRIX_BYTES} bytes.*may need more"),
            hetero.ZeroInitContext(placement_policy="cpu", host_memory=int(2.5 * MATRIX_BYTES)),
        ):
            layers()


class TestBeforeInitialize:
    def test_everything_reads_true_in_the_budget(self, tmp_path: Path) -> None:
        plain, model, context = built(tmp_path)
        inputs = torch.randn(3, WIDTH)
        expected = plain.state_dict()
        state = model.state_dict()
        for name, values in state.items():
            assert torch.equal(values, expected[name]), name
        with torch.no_grad():
            assert torch.equal(model(inputs), plain(inputs))
            norms = (torch._foreach_norm(list(each.parameters())) for each in (model, plain))
            assert all(map(torch.equal, *norms))
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.norm() == theirs.norm()
            assert repr(mine) == repr(theirs)
        copied = copy.deepcopy(model)
        assert all(map(torch.equal, copied.parameters(), plain.parameters()))
        assert {type(p) for p in copied.parameters()} == {nn.Parameter}
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        for name, values in torch.load(file).items():
            assert type(values) is torch.Tensor
            assert torch.equal(values, expected[name])
        assert peak(context) <= 2.5 * MATRIX_BYTES

    def test_what_is_written_is_what_initialize_reads(self, tmp_path: Path) -> None:
        plain, model, context = built_to_train(tmp_path)
        for each in (plain, model):
            with torch.no_grad():
                each[0].weight.mul_(2.0)
                each[1].weight[3].fill_(7.0)
            each[2].weight.data.add_(1.0)
            each[3].weight.data[5:7, ::2] = 0.5
            each[4].weight.data = torch.full((WIDTH, WIDTH), 3.0)
            nn.init.constant_(each[5].weight, 4.0)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        assert peak(context) <= 37.5 * MATRIX_BYTES
        check_trained(model, plain)

    def test_load_state_dict(self, tmp_path: Path) -> None:
        _, model, context = built_to_train(tmp_path)
        other = nn.Sequential(*reversed(layers(48)))
        model.load_state_dict(other.state_dict())
        assert peak(context) <= 37.5 * MATRIX_BYTES
        check_trained(model, other)

    def test_what_is_refused_leaves_the_values(self, tmp_path: Path) -> None:
        """A budget, a block of gathered() that raises, and what gathered() cannot do."""
        plain, model, _ = built(tmp_path)
        with pytest.raises(hetero.BudgetError):
            hetero.initialize(model, hetero.HybridAdam(model.parameters()))
        weight = model[0].weight
        with pytest.raises(KeyError), hetero.gathered(weight, modifier_rank=0):
            weight.data.zero_()
            raise KeyError
        ranks = pytest.raises(ValueError, match="one of the 1 ranks")
        with ranks, hetero.gathered(weight, modifier_rank=1):
            pass
        foreign = nn.Linear(4, 4).weight
        for params in ([foreign], [weight, foreign]):
            refused = pytest.raises(hetero.UnmanagedParameterError, match="belong to 0 engines")
            with refused, hetero.gathered(params):
                pass
        assert all(map(torch.equal, model.parameters(), plain.parameters()))

    def test_gradients(self, tmp_path: Path) -> None:
        with tight(tmp_path, 8) as context:
            model = layers()
            filler = layers(8)
        assert offloaded(model, context)
        del filler
        plain, inputs = layers(), torch.randn(3, WIDTH)
        for each in (plain, model):
            each(inputs).square().mean().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)

    def test_dtypes_may_change(self, tmp_path: Path) -> None:
        plain, model, context = built(tmp_path)
        model.bfloat16()
        plain.bfloat16()
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        assert peak(context) <= 2.5 * MATRIX_BYTES

    def test_aliases_hold_no_memory(self, tmp_path: Path) -> None:
        _, model, context = built(tmp_path)
        aliases = [p.detach() for p in offloaded(model, context)]
        assert len(aliases) > 3
        assert all(isinstance(alias, OffloadedTensor) for alias in aliases)
        for alias in aliases:
            alias.fill_(2.0)
        assert all(bool((alias == 2.0).all()) for alias in aliases)
        twin = nn.Linear(WIDTH, WIDTH, bias=False)
        with pytest.raises(RuntimeError, match=r"under construction.*clone"):
            twin.load_state_dict({"weight": aliases[0]}, assign=True)


def test_gathered(tmp_path: Path) -> None:
    """DeepSpeed's way to initialise parameters by hand."""
    plain = layers(48)
    with tight(tmp_path, 37.5) as context:
        model = layers(48)
        first, second = model[0].weight, model[1].weight
        with hetero.gathered([first, second], modifier_rank=0), torch.no_grad():
            assert torch.equal(first, plain[0].weight)
            first.copy_(second + 1.0)
        with hetero.gathered(model[2].weight):
            assert torch.equal(model[2].weight, plain[2].weight)
    with hetero.gathered(model[3].weight, modifier_rank=0):
        model[3].weight.data.zero_()
    with torch.no_grad():
        plain[0].weight.copy_(plain[1].weight + 1.0)
        plain[3].weight.zero_()
    assert peak(context) <= 37.5 * MATRIX_BYTES
    check_trained(model, plain)


def test_an_alias_from_before_initialize_says_so(tmp_path: Path) -> None:
    plain, model, _ = built_to_train(tmp_path)
    state = model.state_dict()
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    with pytest.raises(hetero.HeteroError, match="take it again"):
        state["0.weight"].sum()
    assert torch.equal(model.state_dict()["0.weight"], plain[0].weight)
    optimizer.engine.close()


@pytest.mark.parametrize("host_memory", ["1MiB", "80KiB"])
def test_a_graph_from_before_initialize_says_so(host_memory: str, tmp_path: Path) -> None:
    with hetero.ZeroInitContext(
        placement_policy="nvme", dtype="fp32", nvme_path=str(tmp_path), host_memory=host_memory
    ):
        model = layers(1)
    loss = (model[0].weight * model[0].weight).sum()
    optimizer = hetero.HybridAdam(model.parameters())
    model, optimizer = hetero.initialize(model, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.engine.close()
