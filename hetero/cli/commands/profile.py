"""`hetero profile`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.cli.commands.outcome import EXIT_OK
from hetero.cli.folders import make_writable
from hetero.cli.parser import examples
from hetero.text_table import columns, terminal_width
from offload.memory.sizes import format_bytes
from offload.profile.machine_profile import Profile, default_path

if TYPE_CHECKING:
    from hetero.cli.commands import Commands


def add_command(commands: Commands) -> None:
    """Adds `profile`."""
    command = commands.add_parser(
        "profile",
        help="measure what this machine moves and computes, for plan",
        description="Measures RAM, updates, products of matrices and, in the given folders, NVMe,"
        " for some 15 seconds, and saves the figures. Nothing else should be running.",
        epilog=examples(
            ("hetero profile", "without disks"),
            ("hetero profile --nvme-path .", "with the disk of this folder"),
            ("hetero profile --threads 4 --output machine.json", "for hetero plan --profile"),
        ),
    )
    command.add_argument(
        "--nvme-path",
        action="append",
        metavar="DIR",
        help="existing folder on NVMe; give it once per disk to measure several together"
        " (default: none)",
    )
    command.add_argument(
        "--threads", type=int, metavar="N", help="of updates and products (default: all CPUs)"
    )
    command.add_argument(
        "--output", metavar="FILE", help=f"where to save (default: {default_path()})"
    )
    command.add_argument(
        "--json", action="store_true", help="print the profile as a JSON object on stdout"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures, saves, and prints the figures."""
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {arguments.threads}")
        import torch

        from hetero.cpu_threads import set_threads

        torch.set_num_threads(arguments.threads)
        set_threads(arguments.threads)

    path = Path(arguments.output) if arguments.output else default_path()
    _check_output(path)  # before a measurement that would be for nothing

    def tell(text: str) -> None:
        print(f"hetero profile: {text}", file=sys.stderr)

    from offload.profile.measure import measure_profile

    profile = measure_profile(arguments.nvme_path or [], platform.node() or "this machine", tell)
    profile.save(path)
    if arguments.json:
        print(json.dumps(profile.as_dict()))
    else:
        print("\n".join(lines(profile)))
        print(f"saved in {path}")
    return EXIT_OK


def _check_output(path: Path) -> None:
    """Raises ValueError if no file can be made at `path`."""
    try:
        make_writable(path.parent)
    except OSError as error:
        raise ValueError(
            f"--output: {path} cannot be written ({error.strerror}); name another file"
        ) from error


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
