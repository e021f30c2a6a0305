"""DeepSpeed's loop on several ranks: functions that every rank runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import hetero
from hetero.compat import deepspeed
from tests.support.compat.megatron import loss_of, run_megatron

OURS = "from hetero.compat import deepspeed"
MICRO, STEPS = 2, 2
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.0}}


def seed_of(rank: int, step: int, micro: int) -> int:
    """Of a rank's micro-batch."""
    return 100 * rank + 10 * step + micro


def train(rank: int, world: int, stage: int, path: str, **zero: Any) -> dict[str, Any]:
    """The tutorial's model, two steps of two micro-batches; what it has then."""
    torch.manual_seed(rank)  # (the first rank's weights count)
    model = run_megatron(OURS, stage, dist.group.WORLD if stage == 3 and not zero else None)
    config = {
        "train_batch_size": 2 * MICRO * world,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": ADAMW,
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
    assert optimizer is not None
    for step in range(STEPS):
        for micro in range(MICRO):
            engine.backward(loss_of(engine, seed_of(rank, step, micro)))
            engine.step()
    if path:
        engine.save_checkpoint(path, client_state={"rank": rank})
    found = {
        "masters": hetero.masters(model.parameters()),
        "norm": engine.get_global_grad_norm(),
        "batch": engine.train_batch_size(),
        "samples": engine.global_samples / engine.global_steps,
        "sent": optimizer.engine.traffic.sent,
        "replicas": optimizer.engine.world.size // optimizer.engine.world.ranks,
    }
    if path:
        back, client_state = engine.load_checkpoint(path)
        assert back is not None
        assert client_state == {"rank": rank}
        again = hetero.masters(model.parameters())
        assert all(map(torch.equal, again, found["masters"]))
    engine.destroy()
    return found


def train_on_nvme(rank: int, world: int, path: str) -> dict[str, Any]:
    """train() where zero.Init knows nothing of the NVMe that the configuration has."""
    on_disk = {"device": "nvme", "nvme_path": path}
    return train(rank, world, 3, "", offload_param=on_disk, offload_optimizer=on_disk)


def replicas_that_come_late(rank: int, world: int) -> str:
    """What becomes of a mesh that zero.Init did not know of."""
    try:
        train(rank, world, 3, "", mics_shard_size=1)
    except hetero.HeteroError as error:
        return str(error)
    return ""


def overflow_on_the_second(rank: int, world: int) -> list[Any]:
    """Steps in fp16 of which the first overflows on one rank only."""
    torch.manual_seed(0)
    model = run_megatron(OURS, 2)
    config = {
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        "zero_optimization": {"stage": 2},
        "optimizer": ADAMW,
        "gradient_clipping": 0.0,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    found = []
    for step in range(2):
        loss = loss_of(engine, seed_of(rank, step, 0))
        engine.backward(loss * (1e6 if rank == 1 and step == 0 else 1.0))
        engine.step()
        found.append((engine.was_step_applied(), engine.skipped_steps, engine.cur_scale))
    engine.destroy()
    return found


def train_replicas(rank: int, world: int) -> dict[str, Any]:
    """train() where each rank is a replica of its own (MiCS with one rank a shard)."""
    return train(rank, world, 2, "", mics_shard_size=1)


def write_without_a_modifier(rank: int, world: int) -> list[tuple[str, list[float]]]:
    """What initialize() says after writes inside GatheredParameters() without a modifier_rank: the
    same on all ranks, then others on each, then on one alone, with other options."""
    found = []
    for values, more in (((2.0, 2.0), {}), ((1.0, 2.0), {}), ((None, 3.0), {"rank_timeout_s": 60})):
        config = {"zero_optimization": {"stage": 3}, "optimizer": ADAMW}
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        value = values[rank]
        with deepspeed.zero.GatheredParameters([model[1].weight], modifier_rank=None):
            if value is not None:
                model[1].weight.data.fill_(value)
        try:
            engine, _, _, _ = deepspeed.initialize(model=model, config={**config, "hetero": more})
        except hetero.HeteroError as error:
            found.append((str(error), []))
        else:
            found.append(("", model[1].weight.detach().unique().tolist()))
            engine.destroy()
    return found


def parts_of_a_parameter(rank: int, world: int) -> list[str]:
    """The tensors of which the parts that ranks have set do not make what they then have."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    config = {"zero_optimization": {"stage": 3}, "optimizer": ADAMW}
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    weight, wrong = model.weight, []

    def check(what: str, get: Any, get_local: Any, set_local: Any) -> None:
        part = torch.arange(5.0) + 10 * rank
        set_local(weight, part)
        expected = torch.cat([torch.arange(5.0), torch.arange(5.0) + 10])[:9].view(3, 3)
        padded = torch.cat([expected.reshape(-1), torch.zeros(1)])[5 * rank : 5 * rank + 5]
        if not torch.equal(get(weight), expected) or not torch.equal(get_local(weight), padded):
            wrong.append(what)

    utils = deepspeed.utils
    engine.backward(engine(torch.ones(2, 3)).sum())
    check(
        "gradient",
        utils.safe_get_full_grad,
        utils.safe_get_local_grad,
        utils.safe_set_local_grad,
    )
    engine.step()
    check(
        "master",
        utils.safe_get_full_fp32_param,
        utils.safe_get_local_fp32_param,
        utils.safe_set_local_fp32_param,
    )
    check(
        "state",
        lambda p: utils.safe_get_full_optimizer_state(p, "exp_avg"),
        lambda p: utils.safe_get_local_optimizer_state(p, "exp_avg"),
        lambda p, part: utils.safe_set_local_optimizer_state(p, part, "exp_avg"),
    )
    engine.destroy()
    return wrong
