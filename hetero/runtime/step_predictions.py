"""What an engine's step is predicted to take, beside its placement, and what limits it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hetero.activations.store import ActivationStore
from hetero.chunk_groups.chunk_group import ChunkGroup, Shared
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.network import Network
from hetero.planning.profiles import saved_profile
from hetero.planning.report import explain, explain_bytes, gains
from hetero.planning.step_cost import Plan, Work, predict
from hetero.runtime.learned_rates import LearnedRates, counters_of
from hetero.runtime.step_tracer import StepTracer
from offload.memory.tiers import Tier
from offload.profile.machine_profile import Profile, Rates

# Tokens of a step, as long as none was measured: `hetero train`'s 8 sequences of 128.
EXPECTED_TOKENS = 1024

_FEWEST_STEPS = 3  # from which rates are learned before the user is told of a limit
_DISK_SHARE = 0.5  # of the step: less is no limit worth a note
_SHORT_STEP_S = 0.1  # nobody waits for a step that is shorter


class StepPredictions:
    """Predicts steps by the saved profile of the machine, or by the training's own rates."""

    def __init__(
        self,
        chunk_groups: Sequence[ChunkGroup],
        shared: Shared,
        group_plans: Callable[[], Sequence[ChunkGroupPlan]],
        tracer: StepTracer,
        activations: ActivationStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Predicts steps of `chunk_groups`, of which more may come.

        `group_plans` gives them as they are placed now, `tracer` the latest step; `activations`
        may have an I/O engine of their own.
        """
        self._shared = shared
        self._world = chunk_groups[0].world
        self._group_plans = group_plans
        self._tracer = tracer
        backend = shared.backend
        self.learned = LearnedRates(lambda: counters_of(chunk_groups, backend, activations), clock)
        self._has_noted = False

    def plans(self) -> list[Plan]:
        """Each chunk group's placement with the step that is predicted for it, main one first.

        Empty if neither a saved profile nor steps say how fast anything is.
        """
        groups = self._group_plans()
        rates = self._saved_profile() or self._learned(groups)
        if rates is None:
            return []
        try:
            return self._plans(groups, rates)
        except ValueError:  # the profile says nothing about what is used
            return []

    def explain(self) -> str:
        """The table of bytes, seconds and limits, for people."""
        plans = self.plans()
        if not plans:
            limits = {tier: self._shared.ledger.budget_bytes[tier.value] for tier in Tier}
            return (
                f"{explain_bytes(self._group_plans(), limits)}\n\nNo step time is expected: there "
                f"is no profile of this machine (hetero profile) that says what is used here, and "
                f"no steps yet from which to learn rates."
            )
        problem = plans[0].problem
        by = f"the profile {problem.profile.name}"
        if not isinstance(problem.profile, Profile):
            by = f"the rates of this training's last {self.learned.steps} steps"
        assumed = ""
        if problem.computing.expected:
            assumed = f", for {EXPECTED_TOKENS} tokens per step until one was made"
        return f"{explain(plans)}\nSeconds are expected by {by}{assumed}."

    def end_step(self) -> None:
        """A step is over. Says once in the engine's notes if the disk is what it waits for."""
        self.learned.end_step()
        if not self._has_noted and self.learned.steps >= _FEWEST_STEPS:
            self._note_limit()

    def _note_limit(self) -> None:
        seen, step_s = self.learned.per_step, self.learned.step_s
        made = self._tracer.latest
        if made is None or step_s < _SHORT_STEP_S:
            return
        computing_s = made.computing.forward_s + made.computing.backward_s
        others_s = max(computing_s, seen.update_s)
        if seen.nvme_s < max(_DISK_SHARE * step_s, others_s):
            return
        self._has_noted = True
        note = f"the disk is the limit: {seen.nvme_s:.2g} s of {step_s:.2g} s per step"
        plans = self.plans()
        saved_s = gains(plans).get("RAM", 0.0) if plans else 0.0
        if saved_s > 0:
            note += f"; one more GiB of host_memory is predicted to save {saved_s:.2g} s"
        self._shared.notes.append(f"{note} (engine.explain() has the figures)")

    def _plans(self, groups: Sequence[ChunkGroupPlan], rates: Rates) -> list[Plan]:
        made, network = self._tracer.latest, None
        if isinstance(rates, Profile):
            several_machines = self._world.is_on_several_machines
            sent_per_s = rates.node_bytes_per_s if several_machines else rates.rank_bytes_per_s
            if sent_per_s is not None:
                network = Network.flat(self._world.size, sent_per_s)
        elif made is None:
            return []
        config = self._shared.config
        return predict(
            groups,
            rates,
            Work(EXPECTED_TOKENS) if made is None else Work(0, made.micro_batches),
            None if made is None else made.computing,
            prefetch=config.debugging.prefetch,
            overlap=config.debugging.overlap,
            network=network,
        )

    def _saved_profile(self) -> Profile | None:
        try:
            return saved_profile(self._shared.config, self._world.local_ranks)
        except ValueError:  # of another version or backend
            return None

    def _learned(self, groups: Sequence[ChunkGroupPlan]) -> Rates | None:
        dtypes = sorted({group.dtypes.compute for group in groups})
        return self.learned.rates(dtypes, self._shared.backend.separate)
