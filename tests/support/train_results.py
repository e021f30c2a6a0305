"""Results of `hetero train` that are made up, so that every number is known."""

from __future__ import annotations

from dataclasses import replace

from hetero.reporting.run_record import RunFacts, RunRecord
from offload.memory.tiers import Account, Tier
from tests.support.run_records import make_record, point, sample

MIB = 1 << 20


def make_result(steps: int, host_budget: int | None = 300 * MIB, ranks: int = 1) -> RunRecord:
    setting = RunFacts(
        title="tiny",
        params=10_000_000,
        plain_bytes=160_000_000,
        plain_tier=Tier.HOST,
        dtype="bf16",
        policy="nvme",
        threads=2,
        engine="io_uring",
        isa="avx2",
        budget_bytes={"device": None, "host": host_budget, "disk": 1 << 40},
        notes=("a note",),
        planned_steps=steps,
        tokens_per_step=100,
        data="text",
        nvme_path="folder",
        run_dir="run",
        ranks=ranks,
    )
    budgets = {Tier(name): budget for name, budget in setting.budget_bytes.items()}
    managed = {
        Tier.DEVICE: {},
        Tier.HOST: {Account.PARAM: 200 * MIB},
        Tier.DISK: {Account.FILE: 95 * MIB},
    }
    points = [
        point(
            number,
            grad_norm=1.0,
            lr=1e-3,
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
            samples=(
                replace(
                    sample(2.0 * number + 8),
                    managed_bytes=managed,
                    budget_bytes=budgets,
                    rss_bytes=800 * MIB,
                ),
            ),
        )
        for number in range(1, steps + 1)
    ]
    result = RunRecord(
        setting,
        points=points,
        budget_bytes=budgets,
        peak_bytes={Tier.DEVICE: 0, Tier.HOST: 200 * MIB, Tier.DISK: 95 * MIB},
        peak_rss_bytes=900 * MIB,
        homes=make_record().homes,
        peak_rss_by_rank_bytes=[(900 + rank) * MIB for rank in range(ranks)],
    )
    for each in points:
        result.add(each)
    return result
