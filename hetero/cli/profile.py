"""`hetero profile`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch

from hetero.cli.outcome import EXIT_OK, check_file
from hetero.cpu_threads import set_threads, share_threads
from hetero.text_table import columns, terminal_width
from offload.memory.sizes import format_bytes
from offload.profile.machine_profile import Profile, default_path
from offload.profile.measure import measure_profile


def run(arguments: argparse.Namespace) -> int:
    """Measures, saves, and prints the figures."""
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
        set_threads(arguments.threads)
    share_threads(1)
    path = Path(arguments.output) if arguments.output else default_path()
    check_file(path, "--output")  # or the measurement would be for nothing

    def tell(text: str) -> None:
        print(f"hetero profile: {text}", file=sys.stderr)

    profile = measure_profile(arguments.nvme_path or [], platform.node() or "this machine", tell)
    profile.save(path)
    if arguments.json:
        print(json.dumps(profile.as_dict()))
    else:
        print("\n".join(lines(profile)))
        print(f"saved in {path}")
    return EXIT_OK


def lines(profile: Profile) -> list[str]:
    """The figures for people."""
    rates = [
        ("RAM", profile.dram_bytes_per_s),
        ("NVMe, reading", profile.nvme_read_bytes_per_s),
        ("NVMe, writing", profile.nvme_write_bytes_per_s),
        ("NVMe, both at once", profile.nvme_mixed_bytes_per_s),
        ("link to device", profile.h2d_bytes_per_s),
        ("link to RAM", profile.d2h_bytes_per_s),
        *((f"update, {dtype}", rate) for dtype, rate in profile.update_bytes_per_s.items()),
    ]
    rows = [(name, f"{rate / 1e9:.2f} GB/s") for name, rate in rates if rate is not None]
    for dtype, flop_per_s in profile.matmul_flop_per_s.items():
        rows.append((f"products, {dtype}", f"{flop_per_s / 1e9:.1f} GFLOP/s"))
    rows += [
        ("RAM, all of it", format_bytes(profile.host_bytes)),
        ("threads", str(profile.threads)),
    ]
    if profile.nvme_bytes is not None:
        rows.append(("NVMe, free", format_bytes(profile.nvme_bytes)))
    return columns(rows, terminal_width())
