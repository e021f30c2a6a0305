"""Profiles of machines that one may not have: examples, from published figures."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from offload.profile.machine_profile import Profile


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


def shipped_profiles() -> dict[str, Path]:
    """The files that come with hetero, by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.json"))}
