"""`hetero plan`: a model's state on machines, and a step there."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hetero.cli.outcome import EXIT_OK, EXIT_USAGE
from hetero.config import Config
from hetero.job.job import arrange_shape
from hetero.job.models import build_shape, model_config, model_label, wanted_vocab_size
from hetero.job.options import DEFAULT_DISK_SHARE, DEFAULT_SHARE, PlanOptions
from hetero.job.ranks import Ranks
from hetero.planning.candidates import SmallestBudgets, smallest_budgets
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.network import Network
from hetero.planning.placement import PlacementError
from hetero.planning.profiles import find_profile, listing, shipped_profiles
from hetero.planning.report import as_dict, explain, seconds_text, state_by_tier
from hetero.planning.step_cost import STEP_FIGURES, Plan, StepCost, Work, predict, whole_step
from hetero.text_table import table, terminal_width, wrapped
from offload.disk.directories import check_directories, total_free_bytes
from offload.memory.process_memory import resident_bytes
from offload.memory.sizes import format_bytes, parse_bytes
from offload.profile.machine_profile import Profile, default_path


def run(arguments: argparse.Namespace) -> int:
    """Prints where the state would live and what a step is predicted to take."""
    if arguments.profile == "list":
        print("\n".join(listing()))
        return EXIT_OK
    given = PlanOptions.from_namespace(arguments)
    vocab_size = wanted_vocab_size(given.model, given.vocab_size)
    options = replace(given, vocab_size=vocab_size)
    # Under --json nothing else may reach stdout, whatever a library prints.
    with contextlib.redirect_stdout(sys.stderr):
        planner = _Planner(options)
        groups = planner.arrange_within(planner.host_bytes, planner.device_bytes)
        plans = planner.predict(groups)
        least = smallest_budgets(planner.arrange_within, planner.device_bytes)
        cases = _what_if(planner, plans, least) if options.what_if else []
    facts, excess = planner.facts(groups), planner.excess(groups, least)
    if excess:
        excess = f"does not fit: {excess}"
    if options.json:
        others = {"what_if": cases} if cases else {}
        print(json.dumps(facts | as_dict(plans, least) | others))
        if excess:
            print(excess, file=sys.stderr)
    else:
        width = terminal_width()
        print(*wrapped(f"{_title(facts)} ({planner.profile.date})", width), "", sep="\n")
        print(explain(plans, least, width))
        if planner.activations is not None:
            print(*wrapped(_activation_words(planner.activations), width), sep="\n")
        if cases:
            print(f"\n{explain_cases(cases, width)}")
        if excess:
            print(*wrapped(excess, width), sep="\n")
    return EXIT_USAGE if excess else EXIT_OK


# What if

RAM, DEVICE, NVME_RATE = "RAM", "DEVICE", "NVMe bandwidth"  # bytes, bytes, bytes per second
_POINTS = 8  # budgets that are tried, beside the one that there is
_ROOM = 1.1  # times all state: with as much everything that can be there is
_DISK_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def case(of: str, value: float, is_given: bool, step: StepCost | None) -> dict[str, Any]:
    """A budget that is another one, all else being equal, and the figures of its step, which are
    None where nothing fits.

    `of` RAM, DEVICE or NVME_RATE there are `value` bytes, or bytes per second that the disk reads;
    `is_given`: this is what there is.
    """
    found = dict.fromkeys(STEP_FIGURES) if step is None else step.figures
    return {"of": of, "value": value, "is_given": is_given, **found}


def _what_if(planner: _Planner, plans: list[Plan], least: SmallestBudgets) -> list[dict[str, Any]]:
    """Cases of RAM, and of DEVICE where that is not RAM, from the least to enough for all state;
    and of NVMe that is faster or slower, if it is used."""
    groups = [plan.group for plan in plans]
    found = []
    state_bytes = sum(sum(kinds.values()) for kinds in state_by_tier(groups).values())
    given = {"host": planner.host_bytes, "device": planner.device_bytes}
    for of, name in ((RAM, "host"), (DEVICE, "device")):
        now = given[name]
        for nbytes in () if now is None else _ladder(least[name] or 0, state_bytes, now):
            budgets = given | {name: nbytes}
            step = None
            with contextlib.suppress(PlacementError):
                arranged = planner.arrange_within(budgets["host"] or 0, budgets["device"])
                step = whole_step(planner.predict(arranged))
            found.append(case(of, nbytes, nbytes == now, step))
    traffic = whole_step(plans).traffic
    for factor in _DISK_FACTORS if traffic["nvme_read"] or traffic["nvme_written"] else ():
        other = planner.rank_profile.with_disk(factor)
        step = whole_step(planner.predict(groups, other))
        found.append(case(NVME_RATE, other.nvme_read_bytes_per_s or 0.0, factor == 1.0, step))
    return found


def _ladder(least: int, most: int, given: int) -> list[int]:
    """Budgets in ascending order, as far from one another, and the given one."""
    low, high = max(1, least), max(int(most * _ROOM), least + 1)
    steps = (low + (high - low) * i // (_POINTS - 1) for i in range(_POINTS))
    return sorted({*steps, given})


def explain_cases(cases: Sequence[Mapping[str, Any]], width: int | None = None) -> str:
    """A table for people; the steps are compared with the given one."""
    rows: list[tuple[str, ...]] = [
        ("what if there were", "", "expected step", "compared", "bound by", "NVMe read", "written")
    ]
    now_s = next(each["step_s"] for each in cases if each["is_given"])
    for each in cases:
        value, (seconds, bound, *moved) = format_bytes(each["value"]), map(each.get, STEP_FIGURES)
        name = f"{value} of {each['of']}" if each["of"] != NVME_RATE else f"NVMe of {value}/s"
        cells = ["nothing fits", "", "", "", ""]
        if seconds is not None:
            compared = f"{seconds / now_s:.0%}" if now_s else "-"
            cells = [f"{seconds_text(seconds)} s", compared, str(bound)]
            cells += [format_bytes(n) if n else "-" for n in moved]
        rows.append((name, "given" if each["is_given"] else "", *cells))
    return table(rows, width)


# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
# equation 1: a layer saves s b h (34 + 5 a s / h) bytes in 16 bits. The second term is the matrix
# of attention, which scaled_dot_product_attention does not keep; of the 34 bytes an element, 32 are
# 16 numbers and 2 are masks of dropout.
_NUMBERS, _MASK_BYTES = 16, 2


def _estimated_activations(
    shape: torch.nn.Module, tokens: int, element_bytes: int
) -> dict[str, int] | None:
    """Bytes of one micro-batch of a rank if all layers keep what they save, and if each keeps its
    input, and the one that is computed again all it saves; logits and temporaries are not in them.
    None for a model that does not say its sizes."""
    config = getattr(shape, "config", None)
    layers, width = (getattr(config, n, None) for n in ("num_hidden_layers", "hidden_size"))
    if not isinstance(layers, int) or not isinstance(width, int):
        return None
    numbers = tokens * width
    layer = numbers * (_NUMBERS * element_bytes + _MASK_BYTES)
    checkpointed = layers * numbers * element_bytes + layer
    return {"kept_bytes": layers * layer, "checkpointed_bytes": checkpointed}


def _activation_words(estimate: Mapping[str, int]) -> str:
    kept, checkpointed = map(format_bytes, estimate.values())
    return (
        f"Activations (estimated, not in the budgets): {kept} a rank, {checkpointed} with "
        f"--gradient-checkpointing; logits are not in it."
    )


class _Planner:
    """Arranges and predicts what was asked for, within budgets and by profiles that may change.

    Attributes:
        profile: of a machine; `rank_profile` is one rank's part of it.
        host_bytes, device_bytes, disk_bytes: one rank's budgets; no device_bytes: DEVICE is RAM.
        activations: estimated bytes, of models that say their sizes.
    """

    def __init__(self, options: PlanOptions) -> None:
        """Nothing is placed yet. Raises ValueError or StoreError for what cannot be."""
        self._options = options
        self.profile = _profile(options.profile)
        local_ranks = self._check_ranks()
        self.rank_profile = self.profile.share(local_ranks)
        host_bytes, self.device_bytes = self._memory_bytes()
        self.disk_bytes = _disk_bytes(options, self.rank_profile)
        if options.policy == "nvme" and not self.disk_bytes:
            raise ValueError("--policy nvme needs --nvme-path, a folder on the NVMe disk")
        process = options.process_memory
        if process == "auto" and options.profile is not None:  # whose limits are not this machine's
            process = str(self.rank_profile.host_bytes)
        self._config = Config.make(
            host_memory=host_bytes,
            process_memory=process,
            activation_memory=options.activation_memory,
            dtype=options.dtype,
            chunk_numel=options.chunk_numel,
            zero_stage=options.zero_stage,
            debug={"overlap_updates": options.overlap_updates},
        )
        # Of model state; less than the machine's budget if the process has a limit.
        self.host_bytes = self._config.host_bytes()
        self._shape = build_shape(model_config(options))
        if options.lora_rank:
            self._shape = _with_adapter(self._shape, options.lora_rank)
        tokens = options.batch_size * options.seq_len
        self._work = Work(tokens, options.accumulate, options.gradient_checkpointing)
        element_bytes = self._config.dtypes.param_bytes
        self.activations = _estimated_activations(self._shape, tokens, element_bytes)

    def _check_ranks(self) -> int:
        """Those of a machine. Raises ValueError if ranks, machines and shards do not fit."""
        options, profile = self._options, self.profile
        ranks, nodes = options.ranks, options.nodes
        if ranks % nodes:
            raise ValueError(
                f"--ranks {ranks} cannot be spread evenly over --nodes {nodes}; choose a multiple"
            )
        local, shard_ranks = ranks // nodes, options.shard_ranks or ranks
        if ranks % shard_ranks or (local % shard_ranks and shard_ranks % local):
            raise ValueError(
                f"--shard-ranks {shard_ranks}: parts of a machine's {local} ranks or whole machines"
                f" share a chunk, and all of {ranks} ranks must be in such a group"
            )
        if profile.separate and local > profile.devices:
            raise ValueError(
                f"--ranks {ranks}: {local} ranks on each machine, and those of the profile "
                f"{profile.name!r} have {profile.devices} GPUs; use fewer ranks, or more --nodes"
            )
        if nodes > 1 and profile.node_bytes_per_s is None:
            connected = [each for each in shipped_profiles() if find_profile(each).node_bytes_per_s]
            raise ValueError(
                f"--nodes {nodes}: the profile {profile.name!r} says nothing about a network "
                f"between machines; use one that does: --machine {' or '.join(connected)}"
            )
        return local

    def _memory_bytes(self) -> tuple[int, int | None]:
        """The budgets of RAM, and of a DEVICE that is not RAM. Raises ValueError."""
        options, name, mine = self._options, repr(self.profile.name), self.rank_profile
        if mine.separate and options.process_memory is not None:
            raise ValueError(
                f"--process-memory: on the machine of the profile {name} activations are "
                f"on devices; use --device-memory and --host-memory"
            )
        if options.process_memory != "auto":
            process = _size(options.process_memory, "--process-memory")
            if process is not None and process > mine.host_bytes:
                raise ValueError(
                    f"--process-memory {format_bytes(process)}: a rank on the machine of the "
                    f"profile {name} has {format_bytes(mine.host_bytes)} of RAM; use less, or a "
                    f"profile of a machine with more"
                )
        host = _size(options.host_memory, "--host-memory")
        device = _size(options.device_memory, "--device-memory")
        if device is not None and not mine.separate:
            raise ValueError(
                f"--device-memory: on the machine of the profile {name} devices have no "
                f"memory of their own; use --host-memory, or another --machine"
            )
        if mine.separate and device is None:
            device = int((mine.device_bytes or 0) * DEFAULT_SHARE)
        elif options.policy == "cuda" and not mine.separate:
            raise ValueError(
                f"--policy cuda: the profile {name} has no device with memory of its own"
            )
        return int(mine.host_bytes * DEFAULT_SHARE) if host is None else host, device

    def excess(self, groups: Sequence[ChunkGroupPlan], least: SmallestBudgets) -> str:
        """Why state and activations together do not fit the memory where compute happens; empty if
        they do. `least`: the smallest budgets of state that work."""
        if self.activations is None:
            return ""
        kept, checkpointed = self.activations.values()
        process, state_bytes = self._config.process_bytes(), least["host"] or 0
        if process is not None:
            # Blocks are computed again, and state leaves RAM, as far as they must.
            needed = resident_bytes() + state_bytes + checkpointed
            if needed <= process:
                return ""
            return (
                f"a process without model state holds about {format_bytes(resident_bytes())}, the "
                f"least state {format_bytes(state_bytes)}, and activations an estimated "
                f"{format_bytes(checkpointed)} if all blocks are computed again; "
                f"use a smaller --batch-size or --seq-len, or --process-memory {needed} at least"
            )
        beside = checkpointed if self._work.checkpointing else kept
        what, name, there = "RAM", "--host-memory", self.rank_profile.host_bytes
        state = sum(group.placement.host_bytes for group in groups)
        if self.rank_profile.device_bytes is not None:
            what, name, there = "device", "--device-memory", self.rank_profile.device_bytes
            state = sum(group.placement.device_bytes for group in groups)
        # With a limit of activations what passes it goes elsewhere.
        if self._config.activation_memory is not None or state + beside <= there:
            return ""
        fix = "a smaller --batch-size or --seq-len"
        if not self._work.checkpointing:
            fix += f", or --gradient-checkpointing ({format_bytes(checkpointed)})"
        if beside < there:
            fix += f", or {name} {there - beside} at most"
        return (
            f"state and pools take {format_bytes(state)} of {what} and activations an estimated "
            f"{format_bytes(beside)}, and a rank has {format_bytes(there)}; use {fix}"
        )

    def arrange_within(
        self, host_bytes: int, device_bytes: int | None
    ) -> tuple[ChunkGroupPlan, ...]:
        """Raises PlacementError if nothing fits so many bytes of RAM and of DEVICE."""
        ranks, bytes_of = Ranks(0, self._options.ranks), (host_bytes, self.disk_bytes, device_bytes)
        return arrange_shape(
            self._shape, self._options, self._config, ranks, *bytes_of
        ).chunk_groups

    def predict(
        self, groups: Sequence[ChunkGroupPlan], profile: Profile | None = None
    ) -> list[Plan]:
        """Steps by one rank's share of the machine; `profile`: of another one."""
        rates, options = profile or self.rank_profile, self._options
        network = Network.of(rates, options.ranks // options.nodes, options.nodes)
        return predict(groups, rates, self._work, overlap=options.overlap, network=network)

    def facts(self, groups: Sequence[ChunkGroupPlan]) -> dict[str, Any]:
        """What was asked for, and what came of it."""
        options = self._options
        return {
            "model": model_label(options),
            "activation_bytes": self.activations,
            "params": sum(param.numel() for param in self._shape.parameters()),
            "policy": options.policy,
            "profile": self.profile.name,
            "ranks": options.ranks,
            "shard_ranks": options.shard_ranks or options.ranks,
            "nodes": options.nodes,
            "budget_bytes": {
                "device": self.device_bytes,
                "host": self.host_bytes,
                "disk": self.disk_bytes,
            },
            "chunks": [
                {"count": len(group.layout.chunks), "numel": group.layout.slot_numel}
                for group in groups
            ],
        }


def _with_adapter(shape: torch.nn.Module, rank: int) -> torch.nn.Module:
    """The model on the meta device with a LoRA adapter, which alone is trained."""
    import peft

    adapter = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weights that are stored transposed
        adapted: torch.nn.Module = peft.get_peft_model(shape, adapter)
    return adapted


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


def _disk_bytes(options: PlanOptions, mine: Profile) -> int:
    """File space of one rank; 0 without a directory."""
    capacity, paths = _size(options.nvme_capacity, "--nvme-capacity"), options.nvme_path
    if not paths:
        if capacity is not None:
            raise ValueError("--nvme-capacity is of no use without --nvme-path; give it too")
        return 0
    if mine.nvme_read_bytes_per_s is None:
        raise ValueError(
            f"the profile {mine.name!r} says nothing about NVMe; measure it: hetero profile "
            f"--nvme-path {paths[0]}"
        )
    free = mine.nvme_bytes or 0
    if options.profile is None:
        free = total_free_bytes(check_directories(paths)) // (options.ranks // options.nodes)
    return int(free * DEFAULT_DISK_SHARE) if capacity is None else capacity
