"""oneflow.optim: hetero's optimizers with OneFlow's arguments."""

from hetero.api.optimizers import Adam as _Adam
from hetero.api.optimizers import HybridAdagrad as Adagrad
from hetero.api.optimizers import HybridSGD
from hetero.compat.renamed_optimizers import RenamedOptimizer

__all__ = ["SGD", "Adagrad", "Adam", "AdamW"]

_ADAM = "params lr betas eps weight_decay amsgrad do_bias_correction **options"
_SGD = "params lr momentum dampening weight_decay nesterov **options"


class SGD(RenamedOptimizer, HybridSGD, arguments=_SGD):
    """hetero.HybridSGD with OneFlow's arguments."""


class Adam(RenamedOptimizer, _Adam, arguments=_ADAM):
    """hetero.Adam with OneFlow's arguments."""


class AdamW(Adam, arguments=_ADAM, decoupled_weight_decay=True):
    """Adam with decoupled weight decay, which is 0 unless it is given."""
