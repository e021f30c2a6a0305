"""ColossalAI's documents of ZeRO, their code and configuration, beside plain PyTorch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.compat import colossalai
from hetero.compat.colossalai.core import global_context as gpc
from hetero.compat.key_table import forget_logged
from hetero.stand_ins.construction_uses import arena_of
from tests.support.compat.colossalai import names_of, train_on_a_rank
from tests.support.compat.document import DOCUMENTS, run_document
from tests.support.ranks.processes import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents say torch.cuda.current_device(); on this machine it is the CPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    loggers = logging.root.manager.loggerDict.values()
    for logger in [each for each in loggers if isinstance(each, logging.Logger)]:
        monkeypatch.setattr(logger, "level", logger.level)  # disable_existing_loggers() sets them


def test_the_example_of_the_low_level_api(
    ranks2: RankPool, nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    """On one rank as on two that have the same data, so that their means are its gradients."""
    forget_logged()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have it: products in fp16 differ by the number of threads
    torch.manual_seed(0)
    with caplog.at_level(logging.INFO):
        model, optimizer = names_of()["main"]()
    torch.set_num_threads(threads)
    assert isinstance(optimizer.optim, hetero.HybridAdam)
    config = optimizer.engine.config
    assert (config.dtype, config.placement_policy, config.zero_stage) == ("fp16", "cpu", 3)
    assert config.debugging.shard_strategy == "tensor"
    masters = hetero.masters(model.parameters())
    for found in ranks2.run(train_on_a_rank):
        assert all(map(torch.equal, found, masters))
    said = "\n".join(caplog.messages)
    assert "After init optim, " in said
    assert "Optimizer step [3/3] " in said
    assert "ShardedModelV2: reuse_fp16_shard is not needed here, because" in said


def configuration(tmp_path: Path, **more: Any) -> Path:
    """The document's template as a file, with other imports and further keys."""
    text = (DOCUMENTS / "colossalai_configuration.txt").read_text()
    line = "from colossalai.zero.shard_utils import TensorShardStrategy"
    assert line in text
    text = text.replace(line, line.replace("colossalai", "hetero.compat.colossalai", 1))
    path = tmp_path / "config.py"
    path.write_text(text + "".join(f"{key} = {value!r}\n" for key, value in more.items()))
    return path


def data(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(4, 2, generator=generator), torch.randn(4, 2, generator=generator))
        for _ in range(count)
    ]


def test_the_example_of_the_high_level_api(tmp_path: Path, nothing_left: None) -> None:
    """The document's small model by the configuration, with an engine."""
    path = configuration(tmp_path, gradient_accumulation=2, clip_grad_norm=0.5, BATCH_SIZE=4)
    colossalai.launch_from_torch(config=path)
    assert gpc.config.BATCH_SIZE == 4
    torch.manual_seed(0)
    imports = {
        "import colossalai": "from hetero.compat import colossalai",
        **{
            f"from {rest}": f"from hetero.compat.{rest}"
            for rest in (
                "colossalai.core import global_context as gpc",
                "colossalai.zero.init_ctx import ZeroInitContext",
            )
        },
    }
    model = run_document("colossalai_small.txt", imports)["model"]
    assert arena_of(model.weight) is not None
    optimizer = colossalai.nn.optimizer.HybridAdam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine, _, _, _ = colossalai.initialize(
        model, optimizer, torch.nn.functional.mse_loss, lr_scheduler=scheduler
    )
    torch.manual_seed(0)
    plain = torch.nn.Linear(2, 2)
    masters = [p.detach().clone().requires_grad_() for p in plain.parameters()]
    plain.half()
    adamw = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.StepLR(adamw, 1, gamma=0.5)

    def expect(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for number, (x, y) in enumerate(batches):
            loss = torch.nn.functional.mse_loss(plain(x.half()), y.half())
            (loss / 2 * 2**5).backward()
            if number % 2:
                for param, master in zip(plain.parameters(), masters, strict=True):
                    master.grad = param.grad.float() / 2**5
                    param.grad = None
                torch.nn.utils.clip_grad_norm_(masters, 0.5)
                adamw.step()
                rates.step()
                with torch.no_grad():
                    for param, master in zip(plain.parameters(), masters, strict=True):
                        param.copy_(master)

    batches = data(4)
    engine.train()
    for number, (x, y) in enumerate(batches):
        engine.zero_grad()
        loss = engine.criterion(engine(x), y.half())
        engine.backward(loss)
        assert engine.step() == bool(number % 2)
        if number % 2:
            scheduler.step()
    expect(batches)
    assert optimizer.param_groups[0]["lr"] == adamw.param_groups[0]["lr"] == 1e-2 / 4
    for found, master in zip(hetero.masters(model.parameters()), masters, strict=True):
        torch.testing.assert_close(found, master.detach(), rtol=1e-5, atol=1e-6)
    assert engine.optimizer.engine.config.placement_policy == "auto"


def test_without_zero_it_is_plain_data_parallelism(nothing_left: None) -> None:
    colossalai.launch_from_torch(config={})
    torch.manual_seed(0)
    model, plain = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    plain.load_state_dict(model.state_dict())
    engine, loader, _, _ = colossalai.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.nn.functional.mse_loss,
        train_dataloader=data(2),
    )
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine.train()
    for x, y in loader:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        reference.zero_grad()
        torch.nn.functional.mse_loss(plain(x), y).backward()
        reference.step()
    assert engine.optimizer.engine.config.dtype == "fp32"
    for found, weight in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"gradient_acumulation": 2}, "did you mean gradient_accumulation"),
        ({"clip_grad_norms": 2}, "did you mean clip_grad_norm"),
        ({"parallel": {"tensor": 2, "enabled": True}}, "data parallelism alone"),
    ],
)
def test_configurations_that_cannot_be(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        colossalai.launch_from_torch(config=configuration(tmp_path, **more))
