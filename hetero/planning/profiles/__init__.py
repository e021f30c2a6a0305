"""Profiles: of machines that one may not have, from published figures, and the one that
`hetero profile` saved for this machine, as one rank's share of it."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.text_table import terminal_width, wrapped
from offload.memory.sizes import format_bytes
from offload.profile.machine_profile import Profile, default_path

if TYPE_CHECKING:  # the command line lists profiles without torch
    from hetero.config import Config


def find_profile(name: str) -> Profile:
    """The profile in the file `name`, or, if that is no path, one that comes with hetero.

    Raises ValueError with the names there are.
    """
    if os.sep in name or name.endswith(".json") or os.path.exists(name):
        return Profile.load(name)
    known = shipped_profiles()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"with hetero come: {', '.join(known)}"
        raise ValueError(f"no file and no profile is called {name!r}; {hint}")
    return Profile.load(known[name])


def listing() -> list[str]:
    """A line for each profile that comes with hetero, and under it where its figures are from."""
    lines, width = [], terminal_width()
    for name in shipped_profiles():
        profile = find_profile(name)
        parts = [f"{format_bytes(profile.host_bytes)} of RAM"]
        if profile.device_bytes is not None:
            gpus = "a GPU" if profile.devices == 1 else f"{profile.devices} GPUs"
            parts.insert(0, f"{gpus} of {format_bytes(profile.device_bytes)}")
        if profile.nvme_read_bytes_per_s is not None:
            parts.append(f"NVMe at {profile.nvme_read_bytes_per_s / 1e9:g} GB/s")
        lines += wrapped(f"{name}: {', '.join(parts)}", width)
        lines += [f"    {line}" for line in wrapped(profile.source, width - 4)]
    return lines


def shipped_profiles() -> dict[str, Path]:
    """The files that come with hetero, by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.json"))}


def saved_profile(config: Config, local_ranks: int = 1) -> Profile | None:
    """What one of `local_ranks` of this machine has of it, as `hetero profile` has measured it.

    None if no profile was saved that this version reads and that is of the backend's device.
    """
    try:
        profile = Profile.load(default_path())
    except ValueError:
        return None
    if config.backend == "emulated" or profile.separate != (config.backend == "cuda"):
        return None
    return profile.share(local_ranks)
