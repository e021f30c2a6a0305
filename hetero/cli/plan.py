"""`hetero plan`: a model's state on machines, and a step there."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hetero.cli.outcome import EXIT_OK, EXIT_USAGE
from hetero.cli.what_if import Case, explain_cases, other_budgets, other_disks
from hetero.config import Config
from hetero.job.job import arrange_shape
from hetero.job.models import build_shape, model_config, model_label, wanted_vocab_size
from hetero.job.options import DEFAULT_DISK_SHARE, DEFAULT_SHARE, TrainOptions
from hetero.job.ranks import Ranks
from hetero.planning.candidates import SmallestBudgets, smallest_budgets
from hetero.planning.group_plans import Arrangement, ChunkGroupPlan
from hetero.planning.network import Network
from hetero.planning.profiles import find_profile, listing, shipped_profiles
from hetero.planning.report import as_dict, explain, state_by_tier
from hetero.planning.step_cost import Plan, StepCost, Work, predict, whole_step
from hetero.text_table import terminal_width, wrapped
from offload.disk.directories import check_directories, total_free_bytes
from offload.memory.process_memory import resident_bytes
from offload.memory.sizes import format_bytes, parse_bytes
from offload.profile.machine_profile import Profile, default_path


def run(arguments: argparse.Namespace) -> int:
    """Prints where the state would live and what a step is predicted to take."""
    if arguments.profile == "list":
        print("\n".join(listing()))
        return EXIT_OK
    given = TrainOptions.from_namespace(arguments)
    vocab_size = wanted_vocab_size(given.model, given.config, given.vocab_size)
    options = replace(given, vocab_size=vocab_size)
    machine = _Machine.of(arguments)
    # Under --json nothing else may reach stdout, whatever a library prints.
    with contextlib.redirect_stdout(sys.stderr):
        planner = _Planner(options, machine, arguments.lora_rank)
        groups = planner.arrange_within(planner.host_bytes, machine.device_bytes).chunk_groups
        plans = planner.predict(groups)
        least = smallest_budgets(planner.arrange_within, machine.device_bytes)
        cases = _what_if(planner, plans, least) if arguments.what_if else []
    facts = {"model": model_label(options), **_facts(planner, groups)}
    excess = planner.excess(groups, least)
    if options.json:
        others = {"what_if": [case.as_dict() for case in cases]} if cases else {}
        print(json.dumps(facts | as_dict(plans, least) | others))
    else:
        width = terminal_width()
        print(*wrapped(f"{_title(facts)} ({machine.profile.date})", width), "", sep="\n")
        print(explain(plans, least, width))
        if planner.activations is not None:
            print(*wrapped(_activation_words(planner.activations), width), sep="\n")
        if cases:
            print(f"\n{explain_cases(cases, width)}")
    if excess:
        lines = [f"does not fit: {excess}"]
        if not options.json:
            lines = wrapped(lines[0], terminal_width())
        print(*lines, sep="\n", file=sys.stderr if options.json else sys.stdout)
    return EXIT_USAGE if excess else EXIT_OK


def _activation_words(estimate: ActivationEstimate) -> str:
    return (
        f"Activations (estimated, not in the budgets): {format_bytes(estimate.kept_bytes)} a rank, "
        f"{format_bytes(estimate.checkpointed_bytes)} with --gradient-checkpointing; logits are "
        f"not in it."
    )


def _what_if(planner: _Planner, plans: list[Plan], least: SmallestBudgets) -> list[Case]:
    machine, groups = planner.machine, [plan.group for plan in plans]
    state_bytes = sum(sum(kinds.values()) for kinds in state_by_tier(groups).values())

    def step_with(host_bytes: int, device_bytes: int | None) -> StepCost:
        return whole_step(
            planner.predict(planner.arrange_within(host_bytes, device_bytes).chunk_groups)
        )

    given = planner.host_bytes, machine.device_bytes
    found = other_budgets(step_with, given, least, state_bytes)
    traffic = whole_step(plans).traffic
    if traffic["nvme_read"] or traffic["nvme_written"]:
        found += other_disks(
            lambda profile: whole_step(planner.predict(groups, profile)), machine.rank_profile
        )
    return found


# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
# equation 1: a layer saves s b h (34 + 5 a s / h) bytes in 16 bits. The second term is the matrix
# of attention, which scaled_dot_product_attention does not keep; of the 34 bytes an element, 32 are
# 16 numbers and 2 are masks of dropout.
_NUMBERS, _MASK_BYTES = 16, 2


@dataclass(frozen=True)
class ActivationEstimate:
    """Bytes of one micro-batch of a rank; logits and temporaries are not in it.

    Attributes:
        kept_bytes: all layers keep what they save.
        checkpointed_bytes: each keeps its input, and the one that is computed again all it saves.
    """

    kept_bytes: int
    checkpointed_bytes: int

    @classmethod
    def of(cls, layers: int, width: int, tokens: int, element_bytes: int) -> ActivationEstimate:
        """Of so many layers over vectors of `width` elements of `element_bytes`."""
        numbers = tokens * width
        layer = numbers * (_NUMBERS * element_bytes + _MASK_BYTES)
        return cls(layers * layer, layers * numbers * element_bytes + layer)


@dataclass(frozen=True)
class _Machine:
    """The machines, and one rank's part of one of them, in bytes."""

    profile: Profile
    rank_profile: Profile
    ranks: int
    shard_ranks: int
    nodes: int
    policy: str
    host_bytes: int
    device_bytes: int | None
    disk_bytes: int

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> _Machine:
        """Raises ValueError or StoreError for what cannot be."""
        ranks, nodes, policy = arguments.ranks, arguments.nodes, arguments.policy
        for name, count in (("ranks", ranks), ("nodes", nodes)):
            if count < 1:
                raise ValueError(f"--{name} must be at least 1, got {count}")
        if ranks % nodes:
            raise ValueError(
                f"--ranks {ranks} cannot be spread evenly over --nodes {nodes}; choose a multiple"
            )
        shard_ranks = ranks if arguments.shard_ranks is None else arguments.shard_ranks
        local = ranks // nodes
        if shard_ranks < 1 or ranks % shard_ranks or (local % shard_ranks and shard_ranks % local):
            raise ValueError(
                f"--shard-ranks {shard_ranks}: parts of a machine's {local} ranks or whole machines"
                f" share a chunk, and all of {ranks} ranks must be in such a group"
            )
        profile = _profile(arguments.profile)
        if profile.separate and local > profile.devices and not arguments.share_gpu:
            raise ValueError(
                f"--ranks {ranks}: {local} ranks on each machine, and those of the profile "
                f"{profile.name!r} have {profile.devices} GPUs; use fewer ranks, or more --nodes, "
                f"or --share-gpu if ranks are to share one"
            )
        if nodes > 1 and profile.node_bytes_per_s is None:
            connected = [name for name in shipped_profiles() if find_profile(name).node_bytes_per_s]
            raise ValueError(
                f"--nodes {nodes}: the profile {profile.name!r} says nothing about a network "
                f"between machines; use one that does: --machine {' or '.join(connected)}"
            )
        if arguments.lora_rank < 0:
            raise ValueError(f"--lora-rank must be 0 or more, got {arguments.lora_rank}")
        if arguments.process_memory is not None and profile.separate:
            raise ValueError(
                f"--process-memory: on the machine of the profile {profile.name!r} activations are "
                f"on devices; use --device-memory and --host-memory"
            )
        mine = profile.share(ranks // nodes)
        automatic = arguments.process_memory == "auto"
        process = None if automatic else _size(arguments.process_memory, "--process-memory")
        if process is not None and process > mine.host_bytes:
            raise ValueError(
                f"--process-memory {format_bytes(process)}: a rank on the machine of the profile "
                f"{profile.name!r} has {format_bytes(mine.host_bytes)} of RAM; use less, or a "
                f"profile of a machine with more"
            )
        host = _size(arguments.host_memory, "--host-memory")
        device = _size(arguments.device_memory, "--device-memory")
        if device is not None and not profile.separate:
            raise ValueError(
                f"--device-memory: on the machine of the profile {profile.name!r} devices have no "
                f"memory of their own; use --host-memory, or another --profile"
            )
        if profile.separate and device is None:
            device = int((mine.device_bytes or 0) * DEFAULT_SHARE)
        elif policy == "cuda" and not profile.separate:
            raise ValueError(
                f"--policy cuda: the profile {profile.name!r} has no device with memory of its own"
            )
        if host is None:
            host = int(mine.host_bytes * DEFAULT_SHARE)
        disk = _disk_bytes(arguments, mine, ranks // nodes)
        return cls(profile, mine, ranks, shard_ranks, nodes, policy, host, device, disk)


class _Planner:
    """Arranges and predicts what was asked for, within budgets and by profiles that may change."""

    def __init__(self, options: TrainOptions, machine: _Machine, lora_rank: int) -> None:
        """Nothing is placed yet. Raises ValueError for what cannot be."""
        if machine.policy == "nvme" and not machine.disk_bytes:
            raise ValueError("--policy nvme needs --nvme-path, a folder on the NVMe disk")
        self.machine = machine
        self._options = options
        self._config = Config.make(
            host_memory=machine.host_bytes,
            process_memory=options.process_memory,
            activation_memory=options.activation_memory,
            dtype=options.dtype,
            chunk_numel=options.chunk_numel,
            zero_stage=options.zero_stage,
            overlap_updates=options.overlap_updates,
        )
        self.shape = build_shape(model_config(options))
        if lora_rank:
            self.shape = _with_adapter(self.shape, lora_rank)
        tokens = options.batch_size * options.seq_len
        self._work = Work(tokens, options.accumulate, options.gradient_checkpointing)
        shape = getattr(self.shape, "config", None)
        layers, width = (getattr(shape, n, None) for n in ("num_hidden_layers", "hidden_size"))
        self.activations: ActivationEstimate | None = None  # of models that say their sizes
        if isinstance(layers, int) and isinstance(width, int):
            element_bytes = self._config.dtypes.param_bytes
            self.activations = ActivationEstimate.of(layers, width, tokens, element_bytes)

    @property
    def host_bytes(self) -> int:
        """Of model state; less than the machine's budget if the process has a limit."""
        return self._config.host_bytes()

    def excess(self, groups: Sequence[ChunkGroupPlan], least: SmallestBudgets) -> str:
        """Why state and activations together do not fit the memory where compute happens; empty if
        they do. `least`: the smallest budgets of state that work."""
        if self.activations is None:
            return ""
        estimate, machine = self.activations, self.machine
        checkpointing = self._work.checkpointing
        process, state_bytes = self._config.process_bytes(), least["host"] or 0
        if process is not None:
            # Blocks are computed again, and state leaves RAM, as far as they must.
            needed = resident_bytes() + state_bytes + estimate.checkpointed_bytes
            if needed <= process:
                return ""
            return (
                f"a process without model state holds about {format_bytes(resident_bytes())}, the "
                f"least state {format_bytes(state_bytes)}, and activations an estimated "
                f"{format_bytes(estimate.checkpointed_bytes)} if all blocks are computed again; "
                f"use a smaller --batch-size or --seq-len, or --process-memory {needed} at least"
            )
        beside = estimate.checkpointed_bytes if checkpointing else estimate.kept_bytes
        limits = self._config.activation_memory is not None  # what passes it goes elsewhere
        device = machine.rank_profile.device_bytes
        what, there = "RAM", machine.rank_profile.host_bytes
        state = sum(group.placement.host_bytes for group in groups)
        if machine.device_bytes is not None and device is not None:
            what, there = "device", device
            state = sum(group.placement.device_bytes for group in groups)
        if limits or state + beside <= there:
            return ""
        fix = "a smaller --batch-size or --seq-len"
        if not checkpointing:
            fix += f", or --gradient-checkpointing ({format_bytes(estimate.checkpointed_bytes)})"
        name = "--host-memory" if what == "RAM" else "--device-memory"
        if beside < there:
            fix += f", or {name} {there - beside} at most"
        return (
            f"state and pools take {format_bytes(state)} of {what} and activations an estimated "
            f"{format_bytes(beside)}, and a rank has {format_bytes(there)}; use {fix}"
        )

    def arrange_within(self, host_bytes: int, device_bytes: int | None) -> Arrangement:
        """Raises PlacementError if nothing fits so many bytes of RAM and of DEVICE."""
        machine = self.machine
        ranks, replicas = Ranks(0, machine.shard_ranks), machine.ranks // machine.shard_ranks
        budgets = host_bytes, machine.disk_bytes, device_bytes
        options, policy = self._options, machine.policy
        return arrange_shape(
            self.shape, options, self._config, ranks, *budgets, policy=policy, replicas=replicas
        )

    def predict(
        self, groups: Sequence[ChunkGroupPlan], profile: Profile | None = None
    ) -> list[Plan]:
        """Steps by one rank's share of the machine; `profile`: of another one."""
        rates, machine = profile or self.machine.rank_profile, self.machine
        network = Network.of(rates, machine.ranks // machine.nodes, machine.nodes)
        overlap = self._options.overlap
        return predict(groups, rates, self._work, overlap=overlap, network=network)


def _with_adapter(shape: torch.nn.Module, rank: int) -> torch.nn.Module:
    """The model on the meta device with a LoRA adapter, which alone is trained."""
    import peft

    adapter = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weights that are stored transposed
        adapted: torch.nn.Module = peft.get_peft_model(shape, adapter)
    return adapted


def _facts(planner: _Planner, groups: Sequence[ChunkGroupPlan]) -> dict[str, Any]:
    """What was asked for, and what came of it."""
    machine = planner.machine
    estimate = planner.activations
    return {
        "activation_bytes": None if estimate is None else asdict(estimate),
        "params": sum(param.numel() for param in planner.shape.parameters()),
        "policy": machine.policy,
        "profile": machine.profile.name,
        "ranks": machine.ranks,
        "shard_ranks": machine.shard_ranks,
        "nodes": machine.nodes,
        "budget_bytes": {
            "device": machine.device_bytes,
            "host": planner.host_bytes,
            "disk": machine.disk_bytes,
        },
        "chunks": [
            {"count": len(group.layout.chunks), "numel": group.layout.slot_numel}
            for group in groups
        ],
    }


def _title(facts: Mapping[str, Any]) -> str:
    """Two lines above the table."""
    ranks = "1 rank" if facts["ranks"] == 1 else f"{facts['ranks']} ranks"
    if facts["nodes"] > 1:
        ranks += f" on {facts['nodes']} machines"
    if facts["shard_ranks"] < facts["ranks"]:
        ranks += f", {facts['shard_ranks']} of which share a chunk"
    chunks = [f"{each['count']} chunks of {each['numel']:,} elements" for each in facts["chunks"]]
    return (
        f"{facts['model']}: {facts['params']:,} parameters in {' and '.join(chunks)}, policy"
        f" {facts['policy']}, {ranks}\non {facts['profile']}"
    )


def _profile(name: str | None) -> Profile:
    if name is not None:
        return find_profile(name)
    path = default_path()
    if not path.exists():
        raise ValueError(
            f"this machine has no profile yet; run `hetero profile` first, or name another one by "
            f"--machine ({', '.join(shipped_profiles())}, or a profile's file)"
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
    if arguments.profile is not None:
        free = profile.nvme_bytes or 0
    else:
        free = total_free_bytes(check_directories(paths)) // local_ranks
    if capacity is not None:
        return capacity
    return int(free * DEFAULT_DISK_SHARE)
