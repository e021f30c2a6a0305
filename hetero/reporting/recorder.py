"""Records what each step of an engine does, with a few reads of counters that exist anyway.

Nothing is sent between ranks: a collective at the end would hang where one rank has ended by an
exception.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TypeVar

import torch

from hetero.checkpoint.engine_checkpoint import STATE_NAMES
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import Placement
from hetero.planning.report import state_by_tier
from hetero.planning.step_cost import Phase, figures
from hetero.reporting.run_record import (
    LINKS,
    PARTS,
    MemoryKind,
    MemorySample,
    PointList,
    RunFacts,
    RunRecord,
    StepPoint,
)
from hetero.runtime.engine import Engine
from offload import timeline
from offload.memory.process_memory import peak_resident_bytes, resident_bytes
from offload.memory.tiers import Tier
from offload.timeline import Recording, Timeline

_Bytes = TypeVar("_Bytes", int, int | None)

_STATE_KINDS = (MemoryKind.PARAM, MemoryKind.GRAD, MemoryKind.OPTIM_STATE)
# fp32 parameter and gradient, where plain PyTorch keeps both; states come on top.
_PLAIN_BYTES = 8
# Of a timeline: as many steps are shown, and one more is recorded, because an interval is known
# when it ends. Of a long run the first one begins with step 3; others come later, and later still.
SHOWN_STEPS = 2
FIRST_TIMELINE = 3
_TIMES = 8


class Recorder:
    """Keeps figures of an engine's steps in `record`; end_step() is called after each.

    Memory is looked at whenever forward or backward of the whole model ends, and at the end of
    step(): about 10 us each, no transfer, and no message to another rank.
    """

    def __init__(
        self,
        engine: Engine,
        facts: RunFacts,
        waits: bool = False,
        timeline_from: int | None = None,
    ) -> None:
        """Listens to the engine until close(); one step goes on from now.

        Args:
            engine: of the steps.
            facts: what is known of the run.
            waits: the work of a part of the step is over when the device is idle, and is waited
                for; else "forward" and "backward" are the times of the CPU.
            timeline_from: as of begin().
        """
        self.record = RunRecord(facts, notes=facts.notes)
        self._engine = engine
        self._waits = waits
        self._points = PointList()
        self._waiting: tuple[StepPoint, torch.Tensor] | None = None  # for its loss
        self._samples: list[MemorySample] = []
        self._phase: Phase | None = None
        self._phase_began_s = 0.0
        self._made = 0
        self._placements: list[Placement] = []
        self._on_disk: dict[MemoryKind, int] = {}
        self.begin(timeline_from)
        engine.watch.tracer.step_clock.listeners.append(self._phase_changes)
        engine.watch.listeners.append(self._note_update)

    def begin(self, timeline_from: int | None) -> None:
        """The first step begins now: what came before, as the load of a checkpoint, is none.

        A timeline begins with the step of the number `timeline_from`, the first one being 1; None:
        there is none.
        """
        self._recording = StepsRecording(self._engine, timeline_from)
        self.begin_step()
        self.begin_s = self._began_s
        self._built = _by_tier(self._engine.ledger.peak_bytes)
        self._sample(0, self.begin_s)

    def close(self) -> None:
        """Ends the listening and the recording of a timeline; idempotent."""
        self._recording.close()
        listeners = self._engine.watch.tracer.step_clock.listeners
        if self._phase_changes in listeners:
            listeners.remove(self._phase_changes)
            self._engine.watch.listeners.remove(self._note_update)

    def _now_s(self) -> float:
        if self._waits:
            device = self._engine.backend.device
            torch.get_device_module(device).synchronize(device)
        return time.perf_counter()

    def _phase_changes(self, phase: Phase | None, beside: tuple[int, int]) -> None:
        now_s = self._now_s()
        if self._phase is not None:
            self._end_part(self._phase.value, now_s)
        if phase is not self._phase:
            self._phase, self._phase_began_s = phase, now_s
        if phase is None:
            self._sample(beside[1], now_s)

    def _note_update(self) -> None:
        """A step() was made: what came since backward was the optimizer's."""
        now_s = self._now_s()
        if self._parts_s["backward"]:
            self._end_part("optimizer", now_s)
        self._phase, self._phase_began_s = None, now_s

    def _end_part(self, name: str, now_s: float) -> None:
        self._parts_s[name] += now_s - self._phase_began_s
        timeline.note("compute", self._phase_began_s, now_s, name=name)

    def _sample(self, beside_bytes: int, now_s: float) -> None:
        rss = resident_bytes()
        ledger = self._engine.ledger
        budgets = _by_tier(ledger.budget_bytes)
        self._samples.append(MemorySample(now_s, ledger.by_account, budgets, beside_bytes, rss))
        timeline.sample("process, bytes held", {"rss": rss})

    def _counters(self) -> dict[str, float]:
        engine = self._engine
        moved = asdict(engine.traffic)
        return {
            **{link: moved[link] for link in LINKS},
            "gather_wait_s": engine.seconds.gather_wait_s,
            "update_s": engine.seconds.update_s,
            "update_wait_s": engine.seconds.update_wait_s,
        }

    def begin_step(self) -> None:
        """A step begins now: what came since the last one, an evaluation say, belongs to none."""
        self._samples.clear()
        self._parts_s = dict.fromkeys(PARTS, 0.0)
        self._before, self._began_s = self._counters(), time.perf_counter()

    def end_step(
        self,
        loss: float | torch.Tensor | None = None,
        tokens: int | None = None,
        step: int | None = None,
        grad_norm: float | None = None,
        lr: float | None = None,
    ) -> StepPoint:
        """A step is over, and the next one begins.

        Args:
            loss: the mean over the step. One on a GPU is asked for at the end of the next step,
                when it is there.
            tokens: how many were trained on, by all ranks together.
            step: its number, from 1; None: the one after the step before.
            grad_norm, lr: as StepPoint has them.
        """
        now_s = time.perf_counter()
        if not self._samples:  # the loop calls no forward of the whole model
            self._sample(0, now_s)
        now = self._counters()
        # (Homes that move get pipelines whose seconds begin at 0 again.)
        moved = {name: max(0.0, now[name] - before) for name, before in self._before.items()}
        self._made = self._made + 1 if step is None else step
        point = StepPoint(
            last=self._made,
            loss=None,
            seconds=now_s - self._began_s,
            parts_s=self._parts_s,
            tokens=tokens,
            traffic_bytes={link: int(moved[link]) for link in LINKS},
            gather_wait_s=moved["gather_wait_s"],
            update_s=moved["update_s"],
            update_wait_s=moved["update_wait_s"],
            samples=tuple(self._samples),
            on_disk=self._homes_on_disk(),
            grad_norm=grad_norm,
            lr=lr,
        )
        for link, nbytes in point.traffic_bytes.items():
            self.record.total_bytes[link] += nbytes
        self._add_waiting()
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
        if isinstance(loss, torch.Tensor) and loss.device.type != "cpu":
            self._waiting = point, loss
        else:
            point = replace(point, loss=None if loss is None else float(loss))
            self._points.add(point)
        self._samples.clear()
        self._parts_s = dict.fromkeys(PARTS, 0.0)
        self._before, self._began_s = now, now_s
        self._recording.end_step()
        return point

    def _add_waiting(self) -> None:
        if self._waiting is not None:
            (point, loss), self._waiting = self._waiting, None
            self._points.add(replace(point, loss=float(loss)))

    def _homes_on_disk(self) -> dict[MemoryKind, int]:
        """Bytes of homes on NVMe by kind; counted again when homes have moved."""
        placements = [group.placement for group in self._engine.chunk_groups]
        if placements != self._placements:
            self._placements = placements
            found = _homes(self._engine)[Tier.DISK]
            self._on_disk = {k: found[k.name] for k in _STATE_KINDS if found[k.name]}
        return self._on_disk

    def complete(self) -> RunRecord:
        """The record, with all that was recorded and what the engine says of the run."""
        self._add_waiting()
        self._recording.close()
        record, engine, ledger = self.record, self._engine, self._engine.ledger
        record.timeline = self._recording.timeline
        if plans := engine.plans:
            record.predicted = figures(plans)
        record.points = self._points.points
        record.budget_bytes = _by_tier(ledger.budget_bytes)
        record.largest_budget_bytes = _by_tier(ledger.largest_budget_bytes)
        record.peak_bytes = _by_tier(ledger.peak_bytes)
        record.built_bytes = self._built
        record.peak_rss_bytes = peak_resident_bytes()
        record.homes = _homes(engine)
        record.changes = tuple((change.step, change.words()) for change in engine.changes)
        record.notes = tuple(dict.fromkeys((*record.notes, *engine.notes)))
        return record


class StepsRecording:
    """Records timelines of a few steps: early, and again when the run has become much longer.

    Attributes:
        timeline: the last one that is whole; None before.
    """

    def __init__(self, engine: Engine, first: int | None) -> None:
        """`first`: the number of the first step that is recorded, from 1; None: none is."""
        self.timeline: Timeline | None = None
        self._engine = engine
        self._next = first
        self._stack = ExitStack()
        self._recording: Recording | None = None
        self._ends_s: list[float] = []  # of the steps that are recorded
        self._made = 0
        self._begin_before(1)

    def end_step(self) -> None:
        """A step was made."""
        self._made += 1
        if self._recording is not None:
            self._ends_s.append(time.perf_counter())
            if len(self._ends_s) > SHOWN_STEPS:
                self.close()
        self._begin_before(self._made + 1)

    def _begin_before(self, step: int) -> None:
        if step != self._next or self._recording is not None:
            return
        self._next = step * _TIMES
        try:
            self._recording = self._stack.enter_context(timeline.record())
        except RuntimeError:  # somebody else's goes on
            return
        self._engine.ledger.sample()

    def close(self) -> None:
        """Ends a recording that goes on, which becomes the timeline; idempotent."""
        recording, self._recording = self._recording, None
        self._stack.close()
        ends_s, self._ends_s = self._ends_s[:SHOWN_STEPS], []
        if recording is not None and ends_s:
            whole = recording.timeline
            self.timeline = whole.between(whole.begin_s, ends_s[-1])


def _by_tier(by_name: Mapping[str, _Bytes]) -> dict[Tier, _Bytes]:
    """What a ledger tells by the names of tiers."""
    return {tier: by_name[tier.value] for tier in Tier}


def facts_of(engine: Engine, title: str) -> RunFacts:
    """What an engine says of its model."""
    plain = params = 0
    frozen_bytes = 4 if engine.config.dtypes.compute == "fp32" else 2
    for group in engine.chunk_groups:
        trained_bytes = _PLAIN_BYTES + 4 * len(STATE_NAMES[group.dtypes.rule])
        for chunk in group.layout.chunks:
            numel = sum(each.param.numel for each in chunk.slices)
            params += numel
            plain += (trained_bytes if chunk.trainable else frozen_bytes) * numel
    return RunFacts(
        title=title,
        params=params,
        plain_bytes=plain,
        plain_tier=Tier.DEVICE if engine.backend.separate else Tier.HOST,
        dtype=engine.config.dtypes.compute,
        policy=engine.config.placement_policy,
        ranks=engine.world.size,
        process_bytes=engine.config.process_bytes(engine.world.local_ranks),
    )


def _homes(engine: Engine) -> dict[Tier, dict[str, int]]:
    """This rank's bytes of state by tier and kind, where it is now."""
    groups = engine.chunk_groups
    return state_by_tier([ChunkGroupPlan(g.plan.spec, g.placement) for g in groups])
