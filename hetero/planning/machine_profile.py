"""The profile that placements are planned by: a rank's share of its machine, alike on all ranks."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from hetero.config import Config
from hetero.planning.profiles import find_profile
from hetero.ranks.process_groups import ProcessGroups
from offload.profile.machine_profile import Profile, default_path

_FAILED = b"!"  # before the text of an error
_NONE = b"?"  # before the reason why there is no profile


@dataclass(frozen=True)
class RankProfile:
    """What one rank has of its machine; `profile` is None if nothing is known, and `note` why."""

    profile: Profile | None
    note: str | None = None
    network_bytes_per_s: float | None = None  # what it sends to other ranks, where it is slowest


def rank_profile(config: Config, world: ProcessGroups) -> RankProfile:
    """The profile that the configuration names, or the one that `hetero profile` has saved.

    All ranks must call it; they get the first rank's, or their plans would differ. Raises
    ValueError if the one that was asked for cannot be used; a saved one is only noted.
    """
    content = _content(config, world)
    if world.everyone is not None:
        content = world.everyone.all_gather_bytes(content, "the machine's profile")[0]
    if content.startswith(_FAILED):
        raise ValueError(content[1:].decode())
    if content.startswith(_NONE):
        return RankProfile(None, content[1:].decode() or None)
    profile = Profile(**json.loads(content))
    several_machines = world.local_ranks < world.size
    network = profile.node_bytes_per_s if several_machines else profile.rank_bytes_per_s
    return RankProfile(profile, None, network)


def _content(config: Config, world: ProcessGroups) -> bytes:
    """This rank's share as JSON, or why there is none."""
    if config.profile is False:
        return _NONE
    given = config.profile is not None
    try:
        found = _find(config)
        if found is None:
            return _NONE + (
                b"placed without a plan, by sizes alone: this machine has no profile; measure it "
                b"once (hetero profile, with --nvme-path for its disk), and placements are chosen "
                b"by predicted step time"
            )
        share = _for_backend(found.share(world.local_ranks), config)
        _check(share, config)
    except ValueError as error:
        if given:
            return _FAILED + f"profile: {error}".encode()
        return _NONE + f"placed without a plan, by sizes alone: {error}".encode()
    return json.dumps(dataclasses.asdict(share)).encode()


def _find(config: Config) -> Profile | None:
    if isinstance(config.profile, Profile):
        return config.profile
    if config.profile is not None:
        return find_profile(str(config.profile))
    path = default_path()
    return Profile.load(path) if path.exists() else None


def _for_backend(profile: Profile, config: Config) -> Profile:
    """One rank's share as the backend uses it."""
    profile.check_backend(config.backend)
    if config.backend == "emulated":
        assert config.link_gbps is not None
        assert config.device_bytes is not None
        return profile.with_link(config.link_gbps * 1e9, config.device_bytes)
    return profile


def _check(profile: Profile, config: Config) -> None:
    """Raises ValueError if it lacks what planning asks for."""
    for dtype in {config.dtypes.compute, "fp32"}:
        profile.rate("matmul_flop_per_s", dtype)
        profile.rate("update_bytes_per_s", dtype)
        if profile.separate:
            profile.rate("device_update_bytes_per_s", dtype)
    if config.nvme_paths and profile.nvme_read_bytes_per_s is None:
        raise ValueError(
            f"the profile {profile.name!r} says nothing about NVMe; measure again with "
            f"hetero profile --nvme-path {config.nvme_paths[0]}"
        )
