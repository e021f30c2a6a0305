"""native/step_pipeline against a model: any calls in any order, with and without faults.

The model updates the same tiles in RAM, at once. A wait that returns must have told the truth;
once a call has failed, all later ones must fail.
"""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from offload import _native
from tests.native.pipeline.test_reading_ahead import expected
from tests.support.native.step_tiles import (
    TILE,
    Filed,
    Tiles,
    hypers,
    pipeline_threads,
)
from tests.support.own_process import descriptors
from tests.support.waiting import in_time

COUNT = 4
KEYS = st.integers(0, COUNT - 1)
FAULTS = (_native.NativeIoError, RuntimeError)


class PipelineMachine(RuleBasedStateMachine):
    """`doomed`: a fault was injected that some call will report, unless nothing meets it.

    Which call that is depends on timing, so no rule's precondition, and nothing that it draws, may
    depend on `failed` or on `guessed`, which lacks what a failed call has not submitted.
    """

    kind = "threads"

    @initialize(buffers=st.integers(1, COUNT + 1), param_in_file=st.booleans())
    def start(self, buffers: int, param_in_file: bool) -> None:
        self.before = descriptors()
        self.folder = tempfile.TemporaryDirectory()
        self.tiles = Tiles(COUNT, "bf16", "bf16")
        path = Path(self.folder.name) / "file"
        self.filed = Filed(self.tiles, path, self.kind, buffers, param_in_file)
        self.model = _native.StepPipeline(None, 0, None, 0, self.tiles.kind, TILE, False, False)
        self.step = 0
        self.doomed = self.failed = False
        self.guessed: dict[int, list[_native.Hyper]] = {}  # by key: of speculative updates

    def call(self, method: Callable[..., None], *arguments: object) -> bool:
        """Whether it returned; it may fail only when doomed, and must when one has failed."""
        try:
            method(*arguments)
        except FAULTS:
            assert self.doomed
            self.failed = True
            return False
        assert not self.failed
        return True

    @rule(order=st.lists(KEYS, min_size=1, max_size=12), priority=st.lists(st.integers(0, 3)))
    def submit(self, order: list[int], priority: list[int]) -> None:
        """(Tasks of one tile stay in their order, whatever their priorities.)"""
        order = [key for key in order if key not in self.guessed]
        self.step += 1
        now = hypers(self.step)
        if self.call(self.filed.pipeline.submit, self.filed.tasks(order, priority), now):
            self.make(order, now)

    def make(self, order: list[int], now: list[_native.Hyper]) -> None:
        self.model.submit(self.tiles.tasks_in_ram(order), now)
        self.model.wait_updated()

    @rule(keys=st.lists(KEYS, min_size=1, unique=True))
    def speculate(self, keys: list[int]) -> None:
        keys = [key for key in keys if key not in self.guessed]
        self.step += 1
        now = hypers(self.step)
        if self.call(self.filed.pipeline.submit, self.filed.speculative(keys), now):
            self.guessed |= dict.fromkeys(keys, now)

    @rule(nth=KEYS, how=st.sampled_from(["confirm", "revoke"]))
    def decide(self, nth: int, how: str) -> None:
        if not self.guessed:
            return
        key = sorted(self.guessed)[nth % len(self.guessed)]
        guessed = self.guessed.pop(key)
        if how == "confirm":
            self.filed.confirm(key)
            self.make([key], guessed)
        else:
            self.call(self.filed.revoke, key)

    @rule(
        order=st.lists(KEYS, max_size=COUNT),
        streaming=st.integers(0, 6),
        priority=st.dictionaries(KEYS, st.integers(0, 3)),
    )
    def expect(self, order: list[int], streaming: int, priority: dict[int, int]) -> None:
        self.call(self.filed.pipeline.expect, expected(self.filed, order, priority), streaming)

    @rule()
    def wait_updated(self) -> None:
        if self.call(self.filed.pipeline.wait_updated) and not self.filed.param_in_file:
            for key, mine in enumerate(self.filed.params):
                assert key in self.guessed or mine.tobytes() == self.tiles.params[key].tobytes()

    @rule(key=KEYS)
    def wait_written(self, key: int) -> None:
        if self.call(self.filed.pipeline.wait_written, key):
            self.check_param(key)

    @rule(key=KEYS)
    def flush(self, key: int) -> None:
        if self.call(self.filed.pipeline.flush, key):
            self.check_param(key)
            self.check_optim_state(key)

    @rule(key=KEYS)
    def rewrite(self, key: int) -> None:
        """forget() is for who writes the file behind the pipeline's back."""
        if key not in self.guessed and self.call(self.filed.pipeline.forget, key):
            self.check_optim_state(key)
            optim_state = self.tiles.optim_states[key]
            optim_state[:] = self.tiles.optim_states[(key + 1) % COUNT]
            os.pwrite(self.filed.fd, optim_state.tobytes(), self.filed.optim_state_at[key])

    @rule()
    def flush_all(self) -> None:
        if self.call(self.filed.pipeline.flush) and not self.guessed:
            assert self.filed.bytes() == self.tiles.bytes()

    @rule(op=st.sampled_from(["read", "write"]), nth=st.integers(0, 20))
    def transfer_is_short(self, op: str, nth: int) -> None:
        self.filed.engine.inject(op, nth, short_bytes=4096)

    @precondition(lambda self: self.step >= 3)
    @rule(op=st.sampled_from(["read", "write"]), nth=st.integers(0, 20))
    def transfer_fails(self, op: str, nth: int) -> None:
        self.doomed = True
        self.filed.engine.inject(op, nth, error=errno.EIO)

    @precondition(lambda self: self.step >= 3)
    @rule(nth=st.integers(0, 8))
    def update_throws(self, nth: int) -> None:
        self.doomed = True
        self.filed.pipeline.inject(nth)

    def check_param(self, key: int) -> None:
        if self.filed.param_in_file:
            wanted = self.tiles.params[key]
            assert self.filed.in_file(wanted, self.filed.param_at[key]) == wanted.tobytes()

    def check_optim_state(self, key: int) -> None:
        wanted = self.tiles.optim_states[key]
        assert self.filed.in_file(wanted, self.filed.optim_state_at[key]) == wanted.tobytes()

    def teardown(self) -> None:
        if not hasattr(self, "filed"):
            return
        self.filed.close()  # with whatever is in flight
        self.model.close()
        self.folder.cleanup()
        assert pipeline_threads() == []
        del self.filed  # whose last transfers hold the file
        assert in_time(descriptors, self.before) == self.before


def test_any_calls_in_any_order(kind: str) -> None:
    machine = type("Machine", (PipelineMachine,), {"kind": kind}).TestCase
    machine.settings = settings(stateful_step_count=25)
    machine().runTest()
