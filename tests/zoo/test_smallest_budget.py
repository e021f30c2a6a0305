"""The budget that a refusal names works at the first try, whatever the model then does."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetero
from tests.zoo.pretrained import TRANSFORMER

pytestmark = pytest.mark.usefixtures("nothing_left")

TOO_LITTLE = 1 << 14  # bytes of RAM
MODEL_TOO_LARGE = 1 << 16  # no parameter is, so that the whole model is known to the refusal
# Names of configurations' classes begin with a family. Those are left out whose modules are as
# another one's.
DECODERS = (
    *("Llama", "Qwen3", "Gemma2", "Phi", "Falcon", "OPT", "GPTJ", "Bloom", "Mixtral", "Qwen2Moe"),
    "Mamba",
)
ENCODERS = ("Bert", "Albert", "DebertaV2")
HEADS_OF = {
    **dict.fromkeys(DECODERS, "ForCausalLM"),
    **dict.fromkeys(ENCODERS, "ForMaskedLM"),
    "Bart": "ForConditionalGeneration",
}
# Options of all configurations; each knows some of them.
SIZES: dict[str, Any] = {
    **TRANSFORMER,
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("n_layer", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "state_size"), 4),
    **dict.fromkeys(("head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("n_embd", "d_model", "n_positions"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "moe_intermediate_size"), 16),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 48),
    "shared_expert_intermediate_size": 48,
    "decoder_start_token_id": 0,
}
USES = (
    "plain",
    "reentrant",
    "checkpointed",
    "lora",
    "dora",
    "lora-checkpointed",
    "dora-checkpointed",
    "evaluation",
    "generate",
)
# Those that were refused in forward or backward, each in its own way, and one of each other use.
CHOSEN = {
    ("Llama", "checkpointed"),
    ("Bart", "checkpointed"),
    ("Llama", "dora"),
    ("Mixtral", "plain"),
    ("Mamba", "reentrant"),
    ("Falcon", "generate"),
}


def build(family: str, use: str) -> nn.Module:
    """A model of the family, tiny, as it is made ready for the use."""
    torch.manual_seed(0)
    config_class = getattr(hf, f"{family}Config")
    computed = {name for name in SIZES if isinstance(getattr(config_class, name, None), property)}
    config = config_class(**{name: n for name, n in SIZES.items() if name not in computed})
    model: Any = getattr(hf, f"{family}{HEADS_OF[family]}")(config)
    if use == "reentrant" or use.endswith("checkpointed"):
        model.gradient_checkpointing_enable({"use_reentrant": use == "reentrant"})
    if "ora" in use:
        import peft

        linear = {name.rpartition(".")[2] for name, m in model.named_modules() if is_linear(m)}
        targets = sorted(linear - {"lm_head", "embed_out", "decoder", "out_proj"})
        config = peft.LoraConfig(r=4, target_modules=targets, use_dora="dora" in use)
        model = peft.get_peft_model(model, config)
    found: nn.Module = model.train(use not in ("evaluation", "generate"))
    return found


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def run(model: Any, optimizer: hetero.HybridAdam, use: str) -> None:
    tokens = torch.randint(2, 101, (2, 12), generator=torch.Generator().manual_seed(1))
    if use == "generate":
        model.generate(tokens[:, :5], max_new_tokens=4, do_sample=False)
    elif use == "evaluation":
        with torch.no_grad():
            model(input_ids=tokens, labels=tokens)
    else:
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def initialized(
    make: Callable[[], nn.Module], host_memory: int, path: Path, **options: Any
) -> tuple[nn.Module, hetero.HybridAdam]:
    with hetero.ZeroInitContext(
        placement_policy="nvme", nvme_path=str(path), host_memory=host_memory, **options
    ):
        model = make()
    trained = [param for param in model.parameters() if param.requires_grad]
    return hetero.initialize(model, hetero.HybridAdam(trained))


def named(
    make: Callable[[], nn.Module], path: Path, too_little: int = TOO_LITTLE, **options: Any
) -> int:
    """The budget that the refusal of too little names, the last of them if it is of what is built
    so far."""
    with pytest.raises(hetero.BudgetError) as refusal:
        initialized(make, too_little, path, **options)
    found = re.findall(r"(?:that works is|takes) \S+ \S+ \((\d+) bytes\)", str(refusal.value))
    assert found, refusal.value
    refusal.value.__traceback__ = None
    gc.collect()
    gc.collect()  # as in tests.zoo.runs.least_host_memory()
    return int(found[-1])


def cases() -> Iterator[Any]:
    for family in HEADS_OF:
        for use in USES:
            checkpoints = use == "reentrant" or use.endswith("checkpointed")
            lacks = family in ENCODERS if use == "generate" else family == "Albert" and checkpoints
            if not lacks:  # Albert's layers, which are one, cannot be checkpointed
                marks = () if (family, use) in CHOSEN else pytest.mark.extra
                yield pytest.param(family, use, id=f"{family}-{use}", marks=marks)


@pytest.mark.parametrize(("family", "use"), list(cases()))
def test_the_budget_named_first_works(family: str, use: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return build(family, use)

    host_memory = named(make, tmp_path, dtype="fp32")
    model, optimizer = initialized(make, host_memory, tmp_path, dtype="fp32")
    run(model, optimizer, use)
    optimizer.engine.close()


class Wired(nn.Module):
    """Has parameters of its own, uses those of modules that are not its children, and checkpoints
    some of what it calls: what is used together does not follow from the tree of modules."""

    def __init__(self, widths: Sequence[int], calls: Sequence[tuple[int, int, str]]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.linears = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64)) for width in widths
        )
        self.scalers = nn.ModuleList(Scaler() for _ in widths)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second, how in self.calls:
            pair, scaler = self.linears[first % len(self.linears)], self.scalers[0]
            other = self.linears[second % len(self.linears)]

            def both(x: torch.Tensor, pair: Any = pair, other: Any = other) -> torch.Tensor:
                return other(pair(x)) * self.scale

            if how == "scaled":
                x = x + self.scalers[second % len(self.scalers)](x, pair, other)
            elif how == "functional":
                inner = F.linear(pair(x), other[0].weight, other[0].bias)
                x = x + F.layer_norm(inner.mean(1, True) + x, (64,), scaler.factor, self.scale)
            elif how == "plain":
                x = x + both(x)
            else:
                x = x + checkpoint(both, x, use_reentrant=how == "reentrant")
        return x


class Scaler(nn.Module):
    """Holds a parameter while it calls modules that it is given, as DoRA's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((64,), 0.5))

    def forward(self, x: torch.Tensor, inner: Any, other: Any) -> torch.Tensor:
        norm = torch.linalg.norm(other[2].weight + 1.0, dim=1)
        return inner(x) * self.factor / norm


WAYS = ("plain", "scaled", "functional", "reentrant", "checkpointed")


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
)
@given(
    widths=st.lists(st.sampled_from([64, 96, 160]), min_size=2, max_size=4),
    calls=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(WAYS)),
        min_size=2,
        max_size=5,
    ),
)
def test_the_budget_named_first_works_however_modules_are_wired(
    widths: list[int], calls: list[tuple[int, int, str]], tmp_path: Path
) -> None:
    """And gives the bits of plain torch."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Wired(widths, calls)

    def backward(model: nn.Module) -> torch.Tensor | None:
        x = torch.ones(2, 64, requires_grad=True)
        model(x).square().mean().backward()
        return x.grad

    plain = make()
    expected = [backward(plain), *(param.grad for param in plain.parameters())]
    options: dict[str, Any] = {"dtype": "fp32", "chunk_numel": 4096}
    host_memory = named(make, tmp_path, MODEL_TOO_LARGE, **options)
    model, optimizer = initialized(make, host_memory, tmp_path, **options)
    found = [backward(model), *hetero.grads(model.parameters())]
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (other is not None and torch.equal(one, other))
    optimizer.engine.close()
