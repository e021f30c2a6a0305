"""`hetero plan`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetero.chunks.layout import Shard
from hetero.cli.commands.outcome import EXIT_OK, missing_extra
from hetero.cli.job.options import (
    DEFAULT_MODEL,
    OPTIMIZERS,
    OVERLAPS,
    STATE_DTYPES,
    TrainOptions,
)
from hetero.config import Config
from hetero.planning.placement import PlacementError
from hetero.planning.predict import Plan, traces_of
from hetero.planning.profiles import find_profile, shipped_profiles
from hetero.planning.report import as_dict, explain
from hetero.planning.step_cost import Problem
from hetero.planning.trace import Work
from offload.disk.directories import check_directories, total_free_bytes
from offload.memory.sizes import parse_bytes
from offload.profile.machine_profile import Profile, default_path

if TYPE_CHECKING:
    import torch

    from hetero.chunks.dtypes import Dtypes
    from hetero.cli.commands import Commands
    from hetero.planning.group_plans import Arrangement

POLICIES = ("auto", "nvme", "cpu", "cuda")
_DEFAULT_SHARE = 0.8  # of RAM and of a device's memory: the rest is for all that is not managed
_DEFAULT_DISK_SHARE = 0.95
_NO_LIMIT = 1 << 62


def add_command(commands: Commands) -> None:
    """Adds `plan`."""
    command = commands.add_parser(
        "plan",
        help="say where a model's state would live, and what a step would take",
        description="Places a model's state without building it, and predicts a step by a machine's"
        " profile: this one's, as `hetero profile` measured it, or another's. Budgets are of one"
        " rank.",
    )
    model = command.add_argument_group("model")
    model.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="NAME", help="by name (default: %(default)s)"
    )
    model.add_argument(
        "--config",
        metavar="FILE",
        help="JSON file with the configuration of any Hugging Face causal language model",
    )
    model.add_argument(
        "--vocab-size", type=int, metavar="N", help="of a model by name (default: as published)"
    )
    memory = command.add_argument_group("memory")
    memory.add_argument("--policy", choices=POLICIES, default="auto", help="default: %(default)s")
    for name, what in (
        ("--device-memory", "memory of a device, where the profile has one that is not RAM"),
        ("--host-memory", "RAM"),
    ):
        memory.add_argument(
            name,
            metavar="BYTES",
            help=f"{what}, for model state (default: {_DEFAULT_SHARE:.0%}% of what there is)",
        )
    memory.add_argument(
        "--nvme-path",
        action="append",
        metavar="DIR",
        help="folder on NVMe, once per disk; with --profile it need not exist (default: none)",
    )
    memory.add_argument(
        "--nvme-capacity",
        metavar="BYTES",
        help=f"file space there (default: {_DEFAULT_DISK_SHARE:.0%}% of what is free)",
    )
    memory.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32 (default: %(default)s)")
    memory.add_argument("--chunk-numel", type=int, metavar="N", help="elements per chunk")
    work = command.add_argument_group("work")
    for name, default, what in (
        ("--batch-size", 8, "sequences per micro-batch of a rank"),
        ("--seq-len", 128, "tokens per sequence"),
        ("--accumulate", 1, "micro-batches of a rank per step"),
        ("--ranks", 1, "ranks in all"),
        ("--nodes", 1, "machines, with as many ranks each"),
        ("--zero-stage", 3, "what ranks share, as `hetero train` says"),
    ):
        work.add_argument(
            name, type=int, default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )
    work.add_argument(
        "--checkpointing", action="store_true", help="backward computes forward once more"
    )
    work.add_argument(
        "--overlap-updates",
        choices=OVERLAPS,
        default=OVERLAPS[0],
        help="what updates overlap with, as `hetero train` says",
    )
    work.add_argument("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    work.add_argument("--state-dtype", choices=STATE_DTYPES, default=STATE_DTYPES[0])
    command.add_argument(
        "--profile",
        metavar="FILE",
        help=f"of the machine: a file, or one of {', '.join(shipped_profiles())}, which come along"
        f" (default: {default_path()})",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints where the state would live and what a step is predicted to take."""
    try:
        # Late, because transformers takes seconds and belongs to the extra `train`.
        from hetero.cli.job.models import model_label, wanted_vocab_size
    except ModuleNotFoundError as error:
        raise missing_extra(error) from None
    machine = _Machine.of(arguments)
    options = TrainOptions(
        model=arguments.model,
        config=arguments.config,
        vocab_size=wanted_vocab_size(arguments.model, arguments.config, arguments.vocab_size),
        dtype=arguments.dtype,
        state_dtype=arguments.state_dtype,
        chunk_numel=arguments.chunk_numel,
        zero_stage=arguments.zero_stage,
        seq_len=arguments.seq_len,
        batch_size=arguments.batch_size,
        accumulate=arguments.accumulate,
        optimizer=arguments.optimizer,
        overlap_updates=arguments.overlap_updates,
        clip=0.0,  # predictions leave clipping out
    )
    # Under --json nothing else may reach stdout, whatever a library prints.
    with contextlib.redirect_stdout(sys.stderr):
        planned = _plan(options, machine, arguments.policy, arguments.checkpointing)
    least = planned.smallest()
    if arguments.json:
        print(json.dumps({**planned.facts(model_label(options)), **planned.numbers(least)}))
    else:
        print(planned.title(model_label(options)))
        print()
        print(explain(planned.plans, least))
    return EXIT_OK


@dataclass(frozen=True)
class _Machine:
    """One rank's part of the machine, in bytes, and how many ranks there are."""

    profile: Profile
    rank_profile: Profile
    ranks: int
    nodes: int
    zero_stage: int
    host_bytes: int
    device_bytes: int | None
    disk_bytes: int

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> _Machine:
        """Raises ValueError or StoreError for what cannot be."""
        for name in ("ranks", "nodes"):
            if getattr(arguments, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
        if arguments.ranks % arguments.nodes:
            raise ValueError(
                f"--ranks {arguments.ranks} cannot be spread evenly over --nodes "
                f"{arguments.nodes}; choose a multiple"
            )
        profile = _profile(arguments.profile)
        local = arguments.ranks // arguments.nodes
        mine = profile.share(local)
        host = _size(arguments.host_memory, "--host-memory")
        device = _size(arguments.device_memory, "--device-memory")
        if device is not None and not profile.separate:
            raise ValueError(
                f"--device-memory: on the machine of the profile {profile.name!r} devices have no "
                f"memory of their own; use --host-memory, or another --profile"
            )
        if profile.separate and device is None:
            device = int((mine.device_bytes or 0) * _DEFAULT_SHARE)
        elif arguments.policy == "cuda" and not profile.separate:
            raise ValueError(
                f"--policy cuda: the profile {profile.name!r} has no device with memory of its own"
            )
        return cls(
            profile,
            mine,
            arguments.ranks,
            arguments.nodes,
            arguments.zero_stage,
            int(mine.host_bytes * _DEFAULT_SHARE) if host is None else host,
            device,
            _disk_bytes(arguments, mine, local),
        )

    @property
    def network_bytes_per_s(self) -> float | None:
        """What this rank sends to the others, at the slowest place."""
        profile = self.rank_profile
        return profile.node_bytes_per_s if self.nodes > 1 else profile.rank_bytes_per_s


@dataclass(frozen=True)
class _Planned:
    """A model's arrangement on a machine, and what its step is predicted to take."""

    machine: _Machine
    arrangement: Arrangement
    plans: list[Plan]  # one per chunk group, the main one first
    policy: str
    params: int
    arrange_with: Callable[..., Arrangement]

    def smallest(self) -> dict[str, int | None]:
        """Bytes of each budget that are just enough, the others being as they are."""
        found: dict[str, int | None] = {"host": 0, "device": None}
        try:
            self.arrange_with(host_bytes=1)
        except PlacementError as refusal:
            found["host"] = refusal.smallest_host_bytes
        if self.machine.device_bytes is not None:
            found["device"] = 0
            try:
                self.arrange_with(host_bytes=_NO_LIMIT, device_bytes=1)
            except PlacementError as refusal:
                found["device"] = refusal.smallest_device_bytes
        return found

    def facts(self, model: str) -> dict[str, Any]:
        """What was asked for."""
        machine = self.machine
        return {
            "model": model,
            "params": self.params,
            "policy": self.policy,
            "profile": machine.profile.name,
            "ranks": machine.ranks,
            "nodes": machine.nodes,
            "budget_bytes": {
                "device": machine.device_bytes,
                "host": machine.host_bytes,
                "disk": machine.disk_bytes,
            },
            "chunks": [
                {"count": len(b.layout.chunks), "numel": b.layout.slot_numel}
                for b in self.arrangement.chunk_groups
            ],
        }

    def numbers(self, least: dict[str, int | None]) -> dict[str, Any]:
        """What came of it."""
        return as_dict(self.plans, least)

    def title(self, model: str) -> str:
        """Two lines above the table."""
        machine = self.machine
        ranks = "1 rank" if machine.ranks == 1 else f"{machine.ranks} ranks"
        if machine.nodes > 1:
            ranks += f" on {machine.nodes} machines"
        chunks = " and ".join(
            f"{len(b.layout.chunks)} chunks of {b.layout.slot_numel:,} elements"
            for b in self.arrangement.chunk_groups
        )
        return (
            f"{model}: {self.params:,} parameters in {chunks}, policy {self.policy}, {ranks}\n"
            f"on {machine.profile.name} ({machine.profile.date})"
        )


def _plan(options: TrainOptions, machine: _Machine, policy: str, checkpointing: bool) -> _Planned:
    import torch

    from hetero.cli.job.models import build_model, model_config
    from hetero.cli.job.optimization import make_optimizer
    from hetero.planning.group_plans import arrange
    from hetero.runtime.update_schedule import check_overlap

    if policy == "nvme" and not machine.disk_bytes:
        raise ValueError("--policy nvme needs --nvme-path, a folder on the NVMe disk")
    config = Config(
        host_memory=machine.host_bytes,
        dtype=options.dtype,
        chunk_numel=options.chunk_numel,
        zero_stage=options.zero_stage,
        overlap_updates=options.overlap_updates,
    )
    check_overlap(config.overlap, machine.ranks)
    architecture = model_config(options)
    with torch.device("meta"):
        shape = build_model(architecture)
        dtypes: Dtypes = make_optimizer(options, shape).dtypes(config)
    stage = config.zero_stage
    shard = Shard(0, machine.ranks, grads=stage >= 2, params=stage >= 3)
    work = Work(options.batch_size * options.seq_len, options.accumulate, checkpointing)

    def arrange_with(**budgets: int) -> Arrangement:
        sizes = {"host_bytes": machine.host_bytes, "device_bytes": machine.device_bytes, **budgets}
        return arrange(
            shape,
            config,
            dtypes,
            disk_bytes=machine.disk_bytes,
            shard=shard,
            policy=policy,
            **sizes,  # type: ignore[arg-type]
        )

    arrangement = arrange_with()
    groups = arrangement.chunk_groups
    plans = [
        Plan.of(
            group,
            Problem(
                trace=trace,
                layout=group.layout,
                dtypes=group.dtypes,
                profile=machine.rank_profile,
                overlap=options.overlap,
                network_bytes_per_s=machine.network_bytes_per_s,
            ),
        )
        for group, trace in zip(groups, traces_of(groups, work, machine.rank_profile), strict=True)
    ]
    return _Planned(machine, arrangement, plans, policy, _count(shape), arrange_with)


def _count(model: torch.nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _profile(name: str | None) -> Profile:
    if name is not None:
        return find_profile(name)
    path = default_path()
    if not path.exists():
        raise ValueError(
            f"this machine has no profile yet; run `hetero profile` first, or give --profile FILE "
            f"({', '.join(shipped_profiles())} come along)"
        )
    return Profile.load(path)


def _size(text: str | None, option: str) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _disk_bytes(arguments: argparse.Namespace, profile: Profile, local_ranks: int) -> int:
    """File space of one rank; 0 without a directory."""
    capacity = _size(arguments.nvme_capacity, "--nvme-capacity")
    paths = arguments.nvme_path or []
    if not paths:
        if capacity is not None:
            raise ValueError("--nvme-capacity is of no use without --nvme-path; give it too")
        return 0
    if profile.nvme_read_bytes_per_s is None:
        raise ValueError(
            f"the profile {profile.name!r} says nothing about NVMe; measure it: hetero profile "
            f"--nvme-path {os.fspath(paths[0])}"
        )
    if capacity is not None:
        return capacity
    if arguments.profile is not None:
        free = profile.nvme_bytes or 0
    else:
        free = total_free_bytes(check_directories(paths)) // local_ranks
    return int(free * _DEFAULT_DISK_SHARE)
