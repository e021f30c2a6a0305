"""What an engine says of its memory and traffic, as plain numbers for any logger."""

from __future__ import annotations

from dataclasses import asdict

from hetero.runtime.engine import Engine

GIB = float(1 << 30)


def step_figures(engine: Engine, prefix: str = "hetero/") -> dict[str, float]:
    """Numbers for a logger: `wandb.log(step_figures(engine))`, or one by one to TensorBoard.

    Args:
        engine: `optimizer.engine`.
        prefix: comes before each name.

    Returns:
        `{tier}_gib` and `{tier}_peak_gib`: what of each memory is in use, and the most that was;
        `{link}_gib`: what has moved so far, of h2d, d2h, disk_read, disk_write, and sent and
        received between ranks; `update_wait_s`, `gather_wait_s`: seconds so far that compute
        waited for updates and for other ranks. Of this rank. Links and tiers that were never used
        are left out.
    """
    ledger = engine.ledger
    found = {f"{tier}_gib": n / GIB for tier, n in ledger.in_use_bytes.items()}
    found |= {f"{tier}_peak_gib": n / GIB for tier, n in ledger.peak_bytes.items()}
    found = {name: n for name, n in found.items() if ledger.peak_bytes[name.split("_")[0]]}
    found |= {f"{link}_gib": n / GIB for link, n in asdict(engine.traffic).items() if n}
    found["update_wait_s"] = engine.seconds.update_wait_s
    if engine.world.size > 1:
        found["gather_wait_s"] = engine.seconds.gather_wait_s
    return {f"{prefix}{name}": value for name, value in found.items()}
