"""hetero.no_sync and the names that DeepSpeed's users call."""

from __future__ import annotations

import pytest
import torch

import hetero


def test_no_sync_needs_a_managed_model() -> None:
    with pytest.raises(hetero.UnmanagedParameterError):
        hetero.no_sync(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "call", [hetero.register_external_parameter, hetero.unregister_external_parameter]
)
def test_external_parameters_are_accepted_and_checked(call) -> None:
    model = torch.nn.Linear(2, 2)
    assert call(model, model.weight) is None
    with pytest.raises(ValueError, match=r"torch\.nn\.Parameter, not Tensor"):
        call(model, torch.zeros(2))
