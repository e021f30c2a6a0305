"""The profile that `hetero profile` saved for this machine, as one rank's share of it."""

from __future__ import annotations

from hetero.config import Config
from offload.profile.machine_profile import Profile, default_path


def saved_profile(
    config: Config, local_ranks: int = 1, threads: int | None = None
) -> Profile | None:
    """What one of `local_ranks` of this machine has of it, as the backend of `config` uses it.

    None if no profile was saved. Raises ValueError if the saved one is of another version, backend
    or number of `threads` (None: as many as were measured).
    """
    path = default_path()
    if not path.exists():
        return None
    profile = Profile.load(path)
    if threads not in (None, profile.threads):
        raise ValueError(f"the profile is of {profile.threads} threads; measure it again")
    profile = profile.share(local_ranks)
    profile.check_backend(config.backend)
    if config.backend == "emulated":
        assert config.debugging.link_gbps is not None
        assert config.device_bytes is not None
        return profile.with_link(config.debugging.link_gbps * 1e9, config.device_bytes)
    return profile
