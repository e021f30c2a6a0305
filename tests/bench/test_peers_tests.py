"""bench/peers_tests: a project's tests over the adapter, and what is told of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peers_tests.__main__ import main
from bench.peers_tests.peers import PEERS
from bench.peers_tests.results import Outcome, told
from bench.peers_tests.stand_ins import install
from tests.support.ranks.processes import run_forked

TESTS = """
import deepspeed
import pytest
from deepspeed.inference.engine import InferenceEngine
from deepspeed.utils import safe_get_full_grad

def test_passes():
    assert not deepspeed.comm.is_initialized()
    assert deepspeed.runtime.lr_schedules.WarmupLR

def test_is_refused():
    deepspeed.init_inference(None)

def test_imports_are_overlaid():
    from torch.nn.parallel import DistributedDataParallel
    assert DistributedDataParallel.__init__.__module__ == "bench.peers_tests.overlays"

def test_fails():
    assert deepspeed.get_accelerator().device_count() == 0

def test_raises():
    raise ValueError("the test's own")

def test_needs_more():
    InferenceEngine()

def test_is_skipped():
    pytest.skip("here")
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    (tmp_path / "deepspeed").mkdir()  # the project's own package, which is not imported
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise ImportError('the real one')")
    results = tmp_path / "results.jsonl"
    arguments = ["deepspeed", "--repo", str(tmp_path), "test_some.py", "--json", str(results)]
    assert main(arguments) == 1
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    found = {name.rpartition("::")[2]: (outcome, reason) for name, outcome, reason, _ in lines}
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "test_passes": "passed",
        "test_is_refused": "refused by name",
        "test_imports_are_overlaid": "passed",
        "test_fails": "failed",
        "test_raises": "failed",
        "test_needs_more": "needs what hetero has not",
        "test_is_skipped": "skipped",
    }
    assert "init_inference: hetero has no inference engine" in found["test_is_refused"][1]
    assert "deepspeed.inference.engine.InferenceEngine" in found["test_needs_more"][1]
    said = capsys.readouterr().out
    assert "failed: test_some.py::test_raises" in said


ACCELERATE = """
import torch
from accelerate import Accelerator

def test_models_are_heteros():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    engine = model.weight._hetero_engine
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    engine.close()
"""
COLOSSALAI = """
import colossalai
from apex import amp
from colossalai.nn.optimizer import HybridAdam

def test_names_are_heteros():
    assert HybridAdam.__module__.startswith("hetero.")
"""
TRAINER = """
import transformers.trainer  # before the package is asked for the name
from hetero.integrations.trainer import HeteroTrainerMixin
from transformers import Trainer

def test_trainers_are_heteros():
    assert issubclass(Trainer, HeteroTrainerMixin)
    assert transformers.trainer.Trainer is Trainer
"""
FULLY_SHARD = """
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

def test_it_is_heteros():
    plain = torch.nn.Linear(2, 2)
    torch.optim.Adam(plain.parameters())
    model = fully_shard(torch.nn.Linear(2, 2))
    before = model.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert isinstance(model, FSDPModule)
    assert model.weight._hetero_engine is optimizer.engine
    assert not torch.equal(model.weight, before)
    assert not hasattr(plain.weight, "_hetero_engine")
    optimizer.engine.close()

def test_without_optimizer():
    model = fully_shard(torch.nn.Linear(2, 2))
    model(torch.ones(2)).sum().backward()
    assert model.weight.grad.tolist() == [[1, 1], [1, 1]]
    model.weight._hetero_engine.close()
"""


def run_over(peer: str, tests: str) -> None:
    """Runs the tests in this process, whose modules get what the import of each would lay over."""
    install(PEERS[peer])
    for name, change in PEERS[peer].overlays.items():
        if name in sys.modules:
            change(sys.modules[name])
    defined: dict[str, Any] = {}
    exec(tests, defined)
    found = [test for name, test in defined.items() if name.startswith("test_")]
    for test in found:
        test()
    assert found


@pytest.mark.parametrize(
    ("peer", "module", "tests"),
    [
        ("pytorch", "torch", FULLY_SHARD),
        ("accelerate", "accelerate", ACCELERATE),
        ("colossalai", "torch", COLOSSALAI),
        ("transformers", "transformers", TRAINER),
    ],
)
def test_overlays(peer: str, module: str, tests: str) -> None:
    """(The command of above shows that imports lay them over.)"""
    pytest.importorskip(module)
    run_forked(run_over, peer, tests)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (
            'File "/x/hetero/config.py", line 9, in make\n'
            "offload.errors.BudgetError: too small\n"
            "unit/common.py:203: in _launch\nE   offload.errors.BudgetError: too small",
            Outcome.REFUSED,
        ),
        ("/x/hetero/config.py:9: in make\nE   TypeError: None", Outcome.FAILED),
        ("unit/x.py:9: in test\nE   AttributeError: no attribute 'ds_tensor'", Outcome.ABSENT),
        ("unit/x.py:9: in test\nE   AttributeError: no attribute 'step'", Outcome.FAILED),
        ('x.py", line 9, in test\n  assert hasattr(p, "ds_id")\nAssertionError\n', Outcome.ABSENT),
        ('x.py", line 9, in test\n  assert p.numel()\nAssertionError\n', Outcome.FAILED),
        ('x.py", line 9, in test\n  assert p.ds_id\nAssertionError: 3', Outcome.FAILED),
        ("a process died", Outcome.FAILED),
    ],
)
def test_what_a_failure_tells(text: str, outcome: Outcome) -> None:
    assert told(PEERS["deepspeed"], text)[0] is outcome
