"""What the CPU must compute in a step at least, measured with all of it in RAM.

That is: forward and backward of the same model in plain torch, in the same dtype, on the same
tokens; and the update of all parameters by hetero's kernel. Each gradient is freed as soon as it is
complete: with all of them kept until zero_grad(), torch takes new memory from the system in every
backward, which took longer than copying them to memory that stays. Where the CPU computes both,
they cannot go on at once for free, so they are added. (The sums of a clipping norm are taken while
gradients are copied, at no cost.)
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from typing import TYPE_CHECKING

import torch

from bench.harness.rounds import Sample
from hetero.chunks.dtypes import Dtypes
from hetero.job.data import Corpus, load_corpus
from hetero.job.models import build_model, count_parameters, model_config
from hetero.job.options import TrainOptions
from offload.profile.measure import UpdateArrays

if TYPE_CHECKING:
    from transformers import PretrainedConfig

UPDATE_NUMEL = 32 << 20  # of the arrays that updates are measured on: beyond any cache
FEW_LAYERS, MORE_LAYERS = 2, 6  # of the small models that a large one is extrapolated from


class ComputeAlone:
    """Models and arrays in RAM that sample() times; close() lets go of them.

    `whole`: the model itself is run, which takes its parameters and gradients in RAM. Otherwise
    models of FEW_LAYERS and of MORE_LAYERS are, and each further layer is taken to cost what one of
    their difference does.
    """

    def __init__(self, options: TrainOptions, dtypes: Dtypes, whole: bool) -> None:
        architecture = model_config(options)
        self.params = count_parameters(architecture)
        self._dtypes = dtypes
        self._accumulate = options.accumulate
        self._batch_size = options.batch_size
        self._corpus = load_corpus(options.data, options.seq_len, options.seed)
        layers = int(architecture.num_hidden_layers)
        counts = [layers] if whole or layers <= MORE_LAYERS else [FEW_LAYERS, MORE_LAYERS]
        self._models = [_plain_model(architecture, n, dtypes.torch_compute) for n in counts]
        self.method = "the whole model"
        self._weights = [1.0]  # of each model's seconds
        if len(counts) == 2:
            more = (layers - FEW_LAYERS) / (MORE_LAYERS - FEW_LAYERS)
            self._weights = [1 - more, more]
            self.method = f"{layers} layers, from models of {FEW_LAYERS} and {MORE_LAYERS}"
        self._arrays = UpdateArrays(min(UPDATE_NUMEL, max(self.params, 1 << 16)))

    def sample(self, passes: int) -> Sample:
        """Seconds of a step: {"forward_s", "backward_s", "update_s", "compute_s"}.

        Forward and backward are medians of `passes`, after one that is not counted.
        """
        forward_s = backward_s = 0.0
        for weight, model in zip(self._weights, self._models, strict=True):
            timed = [_timed_pass(model, self._corpus, self._batch_size) for _ in range(passes + 1)]
            forward_s += weight * statistics.median(t[0] for t in timed[1:]) * self._accumulate
            backward_s += weight * statistics.median(t[1] for t in timed[1:]) * self._accumulate
        kind = self._dtypes.kind
        parts = {
            "forward_s": forward_s,
            "backward_s": backward_s,
            "update_s": kind.bytes_moved(self.params) / self._arrays.update(kind),
        }
        return {**parts, "compute_s": sum(parts.values())}

    def close(self) -> None:
        """Frees the models."""
        self._models.clear()
        gc.collect()


def resident_bytes(params: int, dtypes: Dtypes) -> int:
    """RAM that a whole model takes at most: its parameters, and as much for backward."""
    return params * 2 * dtypes.param_bytes


def _plain_model(
    architecture: PretrainedConfig, layers: int, dtype: torch.dtype
) -> torch.nn.Module:
    architecture = copy.deepcopy(architecture)
    architecture.num_hidden_layers = layers
    torch.manual_seed(0)
    model = build_model(architecture).to(dtype)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_free_grad)
    return model


def _free_grad(param: torch.Tensor) -> None:
    param.grad = None


def _timed_pass(model: torch.nn.Module, corpus: Corpus, batch_size: int) -> tuple[float, float]:
    tokens = corpus.batch(batch_size)
    begin_s = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.item()
    middle_s = time.perf_counter()
    loss.backward()
    end_s = time.perf_counter()
    return middle_s - begin_s, end_s - middle_s
