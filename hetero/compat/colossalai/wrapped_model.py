"""What ColossalAI's wrappers of models share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hetero.compat.late_start import construction_of
from hetero.config import Config
from offload.device.cuda_backend import cuda_available

_BASE = {"backend": "auto", "dtype": "fp16", "initial_loss_scale": None}


class WrappedModel(torch.nn.Module):
    """A model, with the options that its optimizer's wrapper will initialize it with.

    Names of parameters in state_dict() are the model's. Without an optimizer it is used as it is.

    Attributes:
        module: the model.
        config: the options so far.
        process_group: the ranks to shard over, or None.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        options: Mapping[str, Any],
        process_group: Any = None,
        outputs_in_fp32: bool = False,
    ) -> None:
        """`options` replace those of the context that built the model."""
        super().__init__()
        if isinstance(module, WrappedModel):
            raise ValueError(f"the model is a {type(module).__name__} already; wrap it once")
        self.module = module
        construction = construction_of(module)
        base = Config.make(_BASE) if construction is None else construction.config
        self.config = Config.make(base, **options)
        self.process_group = process_group
        self._outputs_in_fp32 = outputs_in_fp32

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        outputs = self.module(*args, **kwargs)
        if not self._outputs_in_fp32:
            return outputs
        return tree_map_only(
            torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, outputs
        )

    def backward(self, loss: torch.Tensor) -> None:
        """loss.backward(); fp16's losses go through the optimizer's backward()."""
        loss.backward()

    def unwrap(self) -> torch.nn.Module:
        """The model."""
        return self.module

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The model's."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module.load_state_dict(*args, **kwargs)


def placement_of(policy: object) -> str:
    """hetero's placement policy; "cuda" where there is no GPU is "auto"."""
    return "auto" if policy == "cuda" and not cuda_available() else str(policy)
