"""Results of `hetero train` that are made up, so that every number is known."""

from __future__ import annotations

from hetero.cli.job.metrics import MemorySample, StepMetrics
from hetero.cli.job.result import Setting, TrainResult

MIB = 1 << 20


def make_result(steps: int, host_budget: int | None = 300 * MIB, ranks: int = 1) -> TrainResult:
    setting = Setting(
        model="tiny",
        params=10_000_000,
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
    return TrainResult(
        setting,
        [
            StepMetrics(
                step=number,
                loss=5.0 / number,
                grad_norm=1.0,
                lr=1e-3,
                step_s=10.0 if number == 1 else 2.0,
                forward_s=0.5,
                backward_s=1.0,
                optimizer_s=0.25,
                tokens=100,
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
                memory=(MemorySample(2.0 * number, held, setting.budget_bytes, 800 * MIB),),
            )
            for number in range(1, steps + 1)
        ],
        peak_managed_bytes=held,
        peak_rss_bytes=900 * MIB,
        peak_rss_by_rank_bytes=[(900 + rank) * MIB for rank in range(ranks)],
    )
