"""What `optimizer.state` is: the tensors that it would have are in chunks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn

from offload.errors import HeteroError


class KeptState(defaultdict[Any, Any]):
    """An empty dict that says where the state is to whoever looks a parameter up, or changes it.

    It is true, because there is a state: torch.distributed.checkpoint would make a step with zeros
    to bring about the state of an optimizer that has none.
    """

    def __init__(self) -> None:
        super().__init__(dict)

    def __bool__(self) -> bool:
        return True

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise HeteroError(
            "optimizer.state has no tensors, because the state is kept in chunks; read it in "
            "optimizer.state_dict()['state'], and change it with optimizer.load_state_dict()"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = _refuse
    get = pop = popitem = setdefault = update = clear = _refuse
