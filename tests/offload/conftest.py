"""What tests of offload/ share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def rig(request: pytest.FixtureRequest, nothing_left: None) -> Iterator[Callable[..., Any]]:
    """Makes what the module calls Rig, closes it at the end, and nothing is left."""
    rigs: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        rigs.append(request.module.Rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for made in rigs:
        made.close()
