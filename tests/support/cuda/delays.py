"""Streams that sleep for random times before what they are given, which must change no bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import torch

_MOST_CYCLES = 400_000  # of a GPU's clock, some tenths of a millisecond
_MOST_STEPS = 8  # of the fake device's other streams


@contextmanager
def delayed_streams(runtime: Any, seed: int) -> Iterator[set[Any]]:
    """Inside, any stream of a CudaRuntime, or of a fake one, may sleep before each piece of work.

    The fake device does its work as late as it may; while a stream sleeps, others go on instead.
    Yields the streams that have slept.
    """
    random, slept, asleep = Random(seed), set[Any](), set[Any]()

    def sleep(stream: Any) -> None:
        slept.add(stream)
        if runtime.device.type == "cuda":
            with torch.cuda.stream(stream):
                torch.cuda._sleep(random.randrange(_MOST_CYCLES))
        else:
            runtime.give_when(stream, lambda: others_go_on(stream))

    def others_go_on(stream: Any) -> bool:
        asleep.add(stream)
        awake = [each for each in runtime.streams if each not in asleep]
        for _ in range(random.randrange(_MOST_STEPS) if awake else 0):
            runtime.step(random.choice(awake))
        asleep.discard(stream)
        return True

    def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if random.random() < 0.5:
                sleep(random.choice([*runtime.streams, runtime.current_stream()]))
            return function(*arguments)

        return call

    with ExitStack() as patches:
        # (handle() comes before what native code gives to a stream.)
        for name in ("copy", "record", "wait"):
            function = delayed(getattr(runtime, name))
            patches.enter_context(patch.object(runtime, name, function))
        yield slept
