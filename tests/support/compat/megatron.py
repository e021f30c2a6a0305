"""What DeepSpeed's tutorial takes for granted of Megatron-LM, and what it leaves out, in small."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.compat.document import run_document

WIDTH, HEADS, VOCABULARY, LENGTH, LAYERS = 32, 4, 61, 12, 2


class MegatronModule(nn.Module):
    """Megatron's base of modules."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


class SkipBias(nn.Linear):
    """Megatron's parallel linear layers, on one rank: the bias is returned, not added."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return F.linear(hidden, self.weight), self.bias


class Attention(nn.Module):
    """Causal self-attention, whose last bias is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.dense = SkipBias(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, **_: Any) -> Any:
        parts = self.query_key_value(hidden).chunk(3, -1)
        query, key, value = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        scores = (query @ key.transpose(-1, -2) / math.sqrt(WIDTH / HEADS)).masked_fill(
            mask, -math.inf
        )
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return self.dense(mixed)


class _Sized:
    """torch, whose nn.Embedding(...) has the size that the document leaves out."""

    class nn:
        @staticmethod
        def Embedding(_: Any) -> nn.Embedding:
            return nn.Embedding(LENGTH, WIDTH)


LEFT_OUT = [
    # GPT2Model: the constructor, and forward before and after the logits
    """
    super().__init__()
    self.language_model = LanguageModel()
    """,
    "parallel_output = forward_method_parallel_output",
    "return output",
    # ParallelMLP
    """
    super().__init__()
    self.dense_h_to_4h = SkipBias(WIDTH, 4 * WIDTH)
    self.dense_4h_to_h = SkipBias(4 * WIDTH, WIDTH)
    """,
    "return self.dense_4h_to_h(F.gelu(intermediate_parallel + bias_parallel))",
    # ParallelTransformerLayer
    "layers = 0",
    """
    super().__init__()
    self.norms = torch_nn.ModuleList([torch_nn.LayerNorm(WIDTH), torch_nn.LayerNorm(WIDTH)])
    self.attention = Attention()
    self.mlp = ParallelMLP(None, None)
    """,
    "layernorm_output = self.norms[0](hidden_states)",
    """
    hidden_states = hidden_states + attention_output + attention_bias
    layernorm_output = self.norms[1](hidden_states)
    """,
    "return hidden_states + mlp_output + mlp_bias",
    # Embedding
    """
    super().__init__()
    self.init_method = init_method
    self.word_embeddings = torch_nn.Embedding(VOCABULARY, WIDTH)
    """,
    "return self.word_embeddings(input_ids) + self.position_embeddings(position_ids)",
    "return model",
]


def run_megatron(import_line: str, stage: int, group: Any = None, remote: str = "cpu") -> Any:
    """A GPT-2 by the tutorial's code, with `import_line` in the place of `import deepspeed`."""

    class Mpu:
        @staticmethod
        def get_data_parallel_group() -> Any:
            return group

    class Args:
        remote_device = remote
        zero_stage = stage

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = names["Embedding"](lambda weight: nn.init.normal_(weight, std=0.02))
            layer = names["ParallelTransformerLayer"]
            self.layers = nn.ModuleList([layer(None, None, None, i) for i in range(LAYERS)])

        def forward(self, ids: torch.Tensor, positions: Any, mask: Any, **_: Any) -> Any:
            hidden = self.embedding(ids, positions)
            for each in self.layers:
                hidden = each(hidden, mask)
            return hidden

    names = run_document(
        "deepspeed_megatron.txt",
        {"import deepspeed": import_line},
        {
            "MegatronModule": MegatronModule,
            "SkipBias": SkipBias,
            "Attention": Attention,
            "LanguageModel": LanguageModel,
            "WIDTH": WIDTH,
            "VOCABULARY": VOCABULARY,
            "F": F,
            "torch": _Sized,
            "torch_nn": nn,
            "mpu": Mpu,
            "get_args": Args,
            "parallel_lm_logits": lambda hidden, weight, _: F.linear(hidden, weight),
        },
        LEFT_OUT,
    )
    return names["build"]()


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    """Cross-entropy of the next tokens of two random sequences."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    logits = model(ids, torch.arange(LENGTH), mask)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


PLAIN = "from tests.support.compat import plain_deepspeed as deepspeed"
