"""Results of `hetero train` that are made up, so that every number is known."""

from __future__ import annotations

from dataclasses import replace

from hetero.cli.job.metrics import MemorySample, StepMetrics
from hetero.cli.job.result import Setting, TrainResult
from offload.memory.tiers import Tier
from tests.support.run_records import make_record, point, sample

MIB = 1 << 20


def make_result(steps: int, host_budget: int | None = 300 * MIB, ranks: int = 1) -> TrainResult:
    setting = Setting(
        model="tiny",
        params=10_000_000,
        state_bytes=160_000_000,
        vocab_size=256,
        dtype="bf16",
        policy="nvme",
        threads=2,
        engine="io_uring",
        isa="avx2",
        budget_bytes={"device": None, "host": host_budget, "disk": 1 << 40},
        notes=("a note",),
        steps=steps,
        tokens_per_step=100,
        data="text",
        nvme_path="folder",
        run_dir="run",
        ranks=ranks,
    )
    held = {"device": 0, "host": 200 * MIB, "disk": 95 * MIB}
    budgets = {Tier(name): budget for name, budget in setting.budget_bytes.items()}
    record = make_record(
        points=[
            point(
                number,
                traffic_bytes={
                    "h2d": 0,
                    "d2h": 0,
                    "disk_read": 7 * number,
                    "disk_write": 9,
                    "sent": 5,
                    "received": 2 * number,
                },
                gather_wait_s=0.5,
                update_s=1.5,
                update_wait_s=0.25,
                samples=(replace(sample(2.0 * number + 8), budget_bytes=budgets),),
            )
            for number in range(1, steps + 1)
        ],
        peak_bytes={Tier(name): nbytes for name, nbytes in held.items()},
        budget_bytes=budgets,
        peak_rss_bytes=900 * MIB,
    )
    facts = replace(record.facts, plain_bytes=setting.state_bytes)
    record = replace(record, facts=facts)
    return TrainResult(
        setting,
        [
            StepMetrics(
                step=made.last,
                loss=made.loss or 0.0,
                grad_norm=1.0,
                lr=1e-3,
                step_s=made.seconds,
                **{f"{name}_s": seconds for name, seconds in made.parts_s.items()},
                tokens=100,
                traffic_bytes=dict(made.traffic_bytes),
                gather_wait_s=made.gather_wait_s,
                update_s=made.update_s,
                update_wait_s=made.update_wait_s,
                memory=(MemorySample(2.0 * made.last, held, setting.budget_bytes, 800 * MIB),),
            )
            for made in record.points
        ],
        peak_managed_bytes=held,
        peak_rss_bytes=900 * MIB,
        peak_rss_by_rank_bytes=[(900 + rank) * MIB for rank in range(ranks)],
        record=record if steps else None,
    )
