"""Budgets are never passed, and the peak is what a formula says."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import psutil
import pytest
import torch

import hetero
from offload.memory.ledger import Ledger
from offload.memory.sizes import parse_bytes
from offload.memory.tiers import Account, Tier
from tests.support.training.loops import batches, build, tiny_gpt2, train
from tests.support.training.smallest import smallest_host_memory

# bytes per element of PARAM, GRAD and OPTIM_STATE
STATE_KINDS = {"fp32": (4, 4, 8), "bf16": (2, 2, 10), "fp16": (2, 2, 12)}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_cpu_peak_is_all_payloads(dtype: str) -> None:
    model, optimizer = build(placement_policy="cpu", dtype=dtype, initial_loss_scale=64.0)
    engine = optimizer.engine
    capacity = engine.layout.slot_count * engine.layout.slot_numel
    train(model, optimizer, batches(2))
    assert engine.ledger.peak_bytes == {
        "device": 0,
        "host": capacity * sum(STATE_KINDS[dtype]),
        "disk": 0,
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_nvme_peak_is_parameters_gradients_and_buffers(dtype: str, tmp_path: Path) -> None:
    model, optimizer = build(
        placement_policy="nvme",
        dtype=dtype,
        nvme_path=str(tmp_path),
        initial_loss_scale=64.0,
        overlap_updates="none",
    )
    engine = optimizer.engine
    param, grad, optim_state = STATE_KINDS[dtype]
    slots, numel = engine.layout.slot_count, engine.layout.slot_numel
    train(model, optimizer, batches(2))
    buffers = 4
    assert engine.ledger.peak_bytes == {
        "device": 0,
        "host": numel * (slots * (param + grad) + buffers * optim_state),
        "disk": slots * numel * optim_state,
    }


def test_nvme_traffic_is_each_streamed_record_once_each_way(tmp_path: Path) -> None:
    """Optimizer states beyond the buffers are read and written once a step, 10 bytes a
    parameter.
    """
    options = {"dtype": "bf16", "nvme_path": str(tmp_path), "overlap_updates": "none"}
    model, optimizer = build(placement_policy="nvme", **options)
    engine = optimizer.engine
    optim_state_bytes = engine.layout.slot_numel * 10
    slots, kept = engine.layout.slot_count, engine.placement.buffers
    before = engine.traffic
    steps = 3
    for tokens in batches(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.synchronize()
    after = engine.traffic
    assert after.disk_write - before.disk_write == steps * (slots - kept) * optim_state_bytes
    reads = steps * slots - (steps - 1) * kept  # the first step finds nothing in the buffers
    assert after.disk_read - before.disk_read == reads * optim_state_bytes
    engine.close()


@pytest.mark.covering(2)
@pytest.mark.parametrize("chunk_numel", [20480, None])
@pytest.mark.parametrize("policy", ["cpu", "nvme", "auto"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_smallest_budget_named_is_the_smallest_that_works(
    policy: str, dtype: str, chunk_numel: int | None, tmp_path: Path
) -> None:
    options = {"placement_policy": policy, "dtype": dtype, "chunk_numel": chunk_numel}
    if policy != "cpu":
        options["nvme_path"] = str(tmp_path)
    too_little = "90KiB" if policy != "cpu" else "1MiB"
    smallest = smallest_host_memory(lambda: build(host_memory=too_little, **options))
    with pytest.raises(hetero.BudgetError):
        build(host_memory=smallest - 1, **options)
    model, optimizer = build(host_memory=smallest, **options)
    engine = optimizer.engine
    train(model, optimizer, batches(2), clip=1.0)
    assert engine.ledger.peak_bytes["host"] <= smallest


def test_every_ledger_change_is_within_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = []
    change = Ledger._change

    def checked(ledger: Ledger, tier: Tier, account: Account, nbytes: int) -> None:
        change(ledger, tier, account, nbytes)
        changes.append(nbytes)
        for name, budget in ledger.budget_bytes.items():
            assert budget is None or ledger.in_use_bytes[name] <= budget

    monkeypatch.setattr(Ledger, "_change", checked)
    model, optimizer = build(
        placement_policy="auto", dtype="bf16", nvme_path=str(tmp_path), host_memory="500KiB",
        nvme_capacity="8MiB",
    )  # fmt: skip
    train(model, optimizer, batches(2), clip=1.0)
    assert len(changes) > 20
    assert set(optimizer.engine.ledger.in_use_bytes.values()) == {0}


def test_disk_budget_too_small_says_so(tmp_path: Path) -> None:
    with pytest.raises(hetero.BudgetError, match="nvme_capacity.* bytes\\) go to disk"):
        build(placement_policy="nvme", nvme_path=str(tmp_path), nvme_capacity="1MiB")


_CHILD = """
import json, resource, sys
import torch
torch.set_num_threads(2)
import hetero
from transformers import GPT2Config, GPT2LMHeadModel

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def build():
    return GPT2LMHeadModel(GPT2Config(n_embd=768, n_layer=LAYERS, n_head=12, n_positions=64,
        vocab_size=256, bos_token_id=0, eos_token_id=0))

def step(model, backward):
    tokens = torch.randint(0, 256, (1, 64))
    backward(model(input_ids=tokens, labels=tokens).loss)

LAYERS = 1  # framework and activations of one layer, all libraries warm
small = build().bfloat16()
step(small, lambda loss: loss.backward())
del small
framework = peak()
LAYERS = int(sys.argv[3])
with hetero.ZeroInitContext(placement_policy="nvme", nvme_path=sys.argv[1], host_memory=sys.argv[2],
                            dtype="bf16"):
    model = build()
optimizer = hetero.HybridAdam(model.parameters())
model, optimizer = hetero.initialize(model, optimizer)
for _ in range(3):
    step(model, optimizer.backward)
    hetero.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps({"framework": framework, "peak": peak(),
                  "params": sum(p.numel() for p in model.parameters())}))
"""


@pytest.mark.extra  # of a smaller model: test_limits.py, under limits of the operating system
@pytest.mark.parametrize("host_memory", ["192MiB", "96MiB"])
def test_peak_rss_stays_under_budget_framework_and_activations(
    host_memory: str, tmp_path: Path
) -> None:
    """57 M parameters, 0.9 GB as others hold them, in a fifth and a tenth of that."""
    layers = 8
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path), host_memory, str(layers)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert found["params"] > 55e6
    # Activations of a layer and the largest transient gradients: 64 tokens, 2.4 M-element matrices.
    activations = layers * (4 << 20) + (48 << 20)
    allowed = parse_bytes(host_memory) + found["framework"] + activations
    assert found["peak"] <= allowed, {k: v / 2**20 for k, v in found.items()}
    assert found["peak"] - found["framework"] < found["params"] * 16 / 3


def test_room_for_gradients_is_charged_before_they_come() -> None:
    """Or what is only to spare, for gathered copies say, could take it."""
    model, optimizer = build(placement_policy="cpu", dtype="bf16")
    ledger = optimizer.engine.ledger
    charged = ledger.used(Tier.HOST, Account.GRAD)
    assert charged > 0
    assert ledger.used(Tier.HOST, Account.INIT) == 0
    tokens = batches(1)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert ledger.used(Tier.HOST, Account.GRAD) == charged
    optimizer.engine.close()


def test_plain_construction_would_need_more(tmp_path: Path) -> None:
    """The budget is below even the fp32 parameters of plain construction."""
    model, optimizer = build(
        placement_policy="nvme", dtype="bf16", nvme_path=str(tmp_path), host_memory="400KiB"
    )
    needed = sum(p.numel() * 4 for p in tiny_gpt2().parameters())
    assert parse_bytes("400KiB") < needed
    assert all(torch.isfinite(m).all() for m in hetero.masters(model.parameters()))
    optimizer.engine.close()


def linear_on_disk(tmp_path: Path) -> tuple[torch.nn.Module, hetero.HybridAdam]:
    """8 M parameters after a step, whose optimizer states (80 MiB) fit in the budget."""
    with hetero.ZeroInitContext(
        placement_policy="nvme", nvme_path=str(tmp_path), host_memory="256MiB"
    ):
        model = torch.nn.Linear(2048, 4096)
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    optimizer.backward(model(torch.ones(1, 2048, dtype=torch.bfloat16)).float().sum())
    optimizer.step()
    return model, optimizer


def test_close_gives_the_memory_back_while_the_engine_is_still_held(tmp_path: Path) -> None:
    model, optimizer = linear_on_disk(tmp_path)
    engine = optimizer.engine
    held_bytes = engine.ledger.in_use_bytes["host"]
    assert held_bytes > 100 << 20
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    engine.close()
    assert before_bytes - process.memory_info().rss > 0.9 * held_bytes
    assert engine.ledger.in_use_bytes["host"] == 0
    del model


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_keeps_an_engine_that_is_dropped(closed: bool, tmp_path: Path) -> None:
    model, optimizer = linear_on_disk(tmp_path)
    engine = weakref.ref(optimizer.engine)
    if closed:
        optimizer.engine.close()
    del model, optimizer
    gc.collect()
    gc.collect()  # what the end of the model has let go of
    assert engine() is None
