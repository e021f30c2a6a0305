"""hetero/compat/colossalai: launching, configurations and loaders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from hetero.compat import colossalai
from hetero.compat.colossalai.booster.plugin import GeminiPlugin
from hetero.compat.colossalai.core import Options
from hetero.compat.colossalai.core import global_context as gpc
from hetero.compat.colossalai.utils import get_current_device, get_dataloader, is_main_process


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    """launch() makes a process group of one process, too, as ColossalAI's."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_launch_says_what_torchrun_would(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.setenv(name, "before")  # which it puts back
        monkeypatch.delenv(name)
    colossalai.launch(0, 1, "127.0.0.1", 29500, seed=3, config={"SEQ": {"length": 3}})
    assert [os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["0", "1", "0"]
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
    assert gpc.config.SEQ.length == 3
    assert (gpc.get_global_rank(), gpc.get_world_size()) == (0, 1)
    with pytest.raises(AttributeError, match="has no 'LENGTH'"):
        _ = gpc.config.LENGTH
    assert Options({"a": {"b": 1}}).a.b == 1
    colossalai.launch_from_torch(config={"cudnn_benchmark": True})
    assert torch.backends.cudnn.benchmark
    colossalai.launch_from_torch()
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("given", [{"mine": 1}, "a file", "a path"])
def test_the_configuration_may_be_a_file(
    given: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    file = tmp_path / "configuration.py"
    file.write_text("mine = 1\n")
    config: Any = {"a file": str(file), "a path": file}.get(str(given), given)
    colossalai.launch(0, 1, "127.0.0.1", 29500, "gloo", 0, 7, False, config=config)
    assert (gpc.config.mine, os.environ["WORLD_SIZE"]) == (1, "1")
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(1))
    colossalai.launch_from_torch("gloo", 3, verbose=False)
    assert gpc.config == {}


def test_loaders_and_utilities() -> None:
    data = TensorDataset(torch.arange(10))
    sizes = [len(x) for (x,) in get_dataloader(data, batch_size=4)]
    assert sizes == [4, 4, 2]
    orders = [
        torch.cat([x for (x,) in get_dataloader(data, shuffle=True, batch_size=4)]).tolist()
        for _ in range(2)
    ]
    assert orders[0] == orders[1] != list(range(10))
    loader = GeminiPlugin().prepare_dataloader(data, 4, drop_last=True)
    assert [len(x) for (x,) in loader] == [4, 4]
    assert get_current_device().type in ("cpu", "cuda")
    assert is_main_process()
