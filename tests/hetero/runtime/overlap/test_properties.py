"""Overlapped updates and reading ahead, in any training on any ranks: not a bit differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.overlap.any_loop import Loop, Model, Step
from tests.support.overlap.any_training import Where, differences
from tests.support.ranks.processes import RankPool

HOW = st.sampled_from(["plain", "plain", "reentrant", "non-reentrant"])
MODELS = st.builds(
    Model,
    st.integers(3, 6),
    st.lists(st.tuples(st.integers(0, 5), HOW), min_size=1, max_size=6).map(tuple),
    st.booleans(),
    st.frozensets(st.integers(0, 5), max_size=2),
)
# (Percents are budgets, of ample ones.)
BETWEEN = ["read", "evaluate", "lr", "grad", "scale", "clear", "save", "20%", "60%"]
ALONE = ["write"]  # is refused with several ranks
CLIPS, CLIPS_NOT = 0.1, 1e6


def one_in(count: int) -> st.SearchStrategy[bool]:
    return st.sampled_from([False] * (count - 1) + [True])


@st.composite
def loops(draw: st.DrawFn, ranks: int) -> Loop:
    """Clipped is a share of the steps from none to all. Most have the same micro-batches: only
    then is it known in backward which gradients are final."""
    share = draw(st.sampled_from([0, 0, 25, 50, 75, 100]))
    clip = st.integers(0, 99).map(lambda number: CLIPS if number < share else CLIPS_NOT)
    micro_batches = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
    usual = st.just(draw(micro_batches))
    between = st.sampled_from(BETWEEN if ranks > 1 else BETWEEN + ALONE)
    step = st.builds(
        Step,
        micro_batches=st.one_of(usual, usual, usual, micro_batches),
        left_out=one_in(5),
        told=st.booleans(),
        clip=st.one_of(clip, clip, st.just(0.0)) if share < 100 else clip,
        between=st.one_of(st.just(""), st.just(""), st.just(""), between),
        clear=st.sampled_from(["after", "after", "after", "before", "late", ""]),
        overflow=one_in(10),
    )
    steps = draw(st.lists(step, min_size=3, max_size=6))
    return Loop(tuple(steps), draw(st.booleans()), draw(st.booleans()))


@st.composite
def places(draw: st.DrawFn, ranks: int, loop: Loop) -> Where:
    """Budgets are from the smallest that work to ample ones. fp16 is never without a GradScaler,
    which refuses gradients in fp16 that the loop has assigned, as it does torch's."""
    policy = draw(st.sampled_from(["cpu", "nvme", "nvme", "nvme", "auto"]))
    emulated = draw(st.booleans())
    percent = st.sampled_from([0, 0, 0, 5, 10, 20, 50, 100])
    fp16 = loop.scaler and all(step.between != "grad" for step in loop.steps)
    budgets = {}
    if policy != "cpu":
        budgets["host_memory"] = draw(percent)
    if emulated:
        budgets["device_memory"] = draw(percent)
    return Where(
        policy=policy,
        emulated=emulated,
        budgets=tuple(budgets.items()),
        chunk_numel=draw(st.sampled_from([4096, 4096, 8192, 16384])),
        dtype=draw(st.sampled_from(["bf16", "fp32", "fp16"] if fp16 else ["bf16", "fp32"])),
        mixed=draw(st.booleans()),
        prefetch=draw(st.booleans()),
        overlap=draw(st.sampled_from(["auto", "forward", "backward", "backward", "both", "both"])),
        stage=draw(st.integers(1, 3)) if ranks > 1 else 3,
    )


@st.composite
def trainings(draw: st.DrawFn) -> tuple[int, Model, Loop, Where]:
    """The number of ranks comes first. More than one take longer, so most examples have one."""
    ranks = draw(st.sampled_from([1, 1, 1, 1, 1, 1, 2, 2, 3]))
    loop = draw(loops(ranks))
    return ranks, draw(MODELS), loop, draw(places(ranks, loop))


@pytest.fixture(scope="module")
def pools(ranks_of: Callable[[int], RankPool]) -> dict[int, RankPool]:
    """Ranks that stay up for all examples, by their number."""
    return {2: ranks_of(2), 3: ranks_of(3)}


def found_by(
    pools: Mapping[int, RankPool], ranks: int, model: Model, loop: Loop, where: Where
) -> list[str]:
    """What differs on any rank."""
    if ranks == 1:
        return differences(0, 1, model, loop, where)
    return [one for found in pools[ranks].run(differences, model, loop, where) for one in found]


# Gradients that are cleared after one rank has sent them and others, whose device was slower, not.
CLEARED = (
    3,
    Model(3, ((5, "plain"), (4, "plain"), (4, "reentrant"), (2, "plain")), True, frozenset([1, 3])),
    Loop(
        (
            Step((1,), False, False, 0.0, "", "before", False),
            Step((1, 5, 0), True, True, 0.1, "60%", "before", False),
            Step((1, 5, 0), True, True, 0.0, "", "late", False),
            Step((5, 3, 4), False, False, 0.0, "", "before", False),
            Step((1, 5, 0), False, False, 0.0, "", "after", False),
        ),
        scaler=True,
        decays=False,
    ),
    Where(
        policy="nvme",
        emulated=True,
        budgets=(("host_memory", 0), ("device_memory", 20)),
        chunk_numel=16384,
        dtype="bf16",
        mixed=False,
        prefetch=True,
        overlap="both",
        stage=2,
    ),
)


# A mean of the first micro-batch arrives in the backward of a second one that no step had before.
LATE_MEAN = (
    3,
    Model(4, tuple((index, "plain") for index in (1, 1, 3, 0, 0, 3)), False, frozenset()),
    Loop(
        (
            Step((4,), True, False, 0.0, "", "after", False),
            Step((5, 2), True, False, 1e6, "", "", False),
        ),
        scaler=False,
        decays=False,
    ),
    Where(
        policy="nvme",
        emulated=False,
        budgets=(("host_memory", 0),),
        chunk_numel=16384,
        dtype="fp32",
        mixed=False,
        prefetch=False,
        overlap="backward",
        stage=2,
    ),
)


@settings(max_examples=6)
@example(CLEARED)
@example(LATE_MEAN)
@given(training=trainings())
def test_any_training(pools: dict[int, RankPool], training: tuple[int, Model, Loop, Where]) -> None:
    assert not found_by(pools, *training)


@pytest.mark.extra
@pytest.mark.slow
@settings(max_examples=1000)
@given(training=trainings())
def test_many_trainings(
    pools: dict[int, RankPool], training: tuple[int, Model, Loop, Where]
) -> None:
    """As above, for some ten minutes."""
    assert not found_by(pools, *training)
