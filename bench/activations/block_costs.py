"""What the blocks of a model take in a forward that keeps everything: seconds, and bytes saved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class BlockCosts:
    """Measures the calls of blocks, none of which is computed again."""

    def __init__(self, model: torch.nn.Module, blocks: torch.nn.ModuleList) -> None:
        self._params = list(model.parameters())
        self._began_s = 0.0
        self._is_inside = False
        self._memory: set[int] = set()  # addresses of what is counted, or is no activation
        self.forward_s = 0.0  # of all calls so far
        # Of one step, of all calls: what autograd keeps but for weights, and their inputs.
        self.saved_bytes = self.input_bytes = 0
        for block in blocks:
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(self._end)

    def _begin(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._is_inside = True
        if self._memory:
            self.input_bytes += inputs[0].nbytes
            # Here, because a weight's memory may be there while its block computes alone.
            self._memory |= {param.untyped_storage().data_ptr() for param in self._params}
        self._began_s = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.forward_s += time.perf_counter() - self._began_s
        self._is_inside = False

    @contextmanager
    def counting_bytes(self) -> Iterator[None]:
        """Inside, where a forward has to be, bytes are counted, which takes some time."""
        # 0 is the address of what has no memory.
        self._memory, self.saved_bytes, self.input_bytes = {0}, 0, 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            # Two tensors in the same memory are kept once; none is freed before backward.
            if self._is_inside and storage.data_ptr() not in self._memory:
                self._memory.add(storage.data_ptr())
                self.saved_bytes += storage.nbytes()
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            yield
        self._memory = set()
