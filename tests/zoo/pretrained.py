"""Models of the transformers and peft libraries, made tiny from their configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.zoo.case import Case, Where, tokens

TOKENS: dict[str, Any] = {
    "vocab_size": 101,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LAYERS: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2}
ATTENTION: dict[str, Any] = {**LAYERS, "num_attention_heads": 2}
TRANSFORMER: dict[str, Any] = {
    **TOKENS,
    **ATTENTION,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


def gpt2() -> nn.Module:
    config = hf.GPT2Config(**TOKENS, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    return hf.GPT2LMHeadModel(config)


def gpt2_checkpointed() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TRANSFORMER, num_key_value_heads=1))


def opt() -> nn.Module:
    config = hf.OPTConfig(
        **TOKENS, **ATTENTION, max_position_embeddings=32, ffn_dim=64, word_embed_proj_dim=16
    )
    return hf.OPTForCausalLM(config)


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**TRANSFORMER))


def t5() -> nn.Module:
    config = hf.T5Config(
        **TOKENS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        **ATTENTION, intermediate_size=64, image_size=16, patch_size=4, num_labels=7
    )
    return hf.ViTForImageClassification(config)


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        **TRANSFORMER,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    return hf.MixtralForCausalLM(config)


def mamba() -> nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(**TOKENS, **LAYERS, state_size=4))


def mamba2() -> nn.Module:
    config = hf.Mamba2Config(
        **TOKENS, **LAYERS, num_heads=4, head_dim=16, state_size=4, n_groups=1, chunk_size=8
    )
    return hf.Mamba2ForCausalLM(config)


def jamba() -> nn.Module:
    config = hf.JambaConfig(
        **TRANSFORMER,
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
        mamba_dt_rank=2,
        use_mamba_kernels=False,
    )
    return hf.JambaForCausalLM(config)


def lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
    )
    return peft.get_peft_model(llama(), config)  # type: ignore[arg-type]


def pictures(where: Where) -> dict[str, torch.Tensor]:
    generator = where.generator()
    return {
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 7, (2,), generator=generator),
    }


def labelled(where: Where) -> dict[str, torch.Tensor]:
    found = tokens(where)
    return {"input_ids": found, "labels": found}


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


LANGUAGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "opt": opt,
    "bert": bert,
    "t5": t5,
    "mixtral": mixtral,
    "mamba": mamba,
    "lora": lora,
}
CASES = [
    *(Case(name, make, labelled, own_loss) for name, make in LANGUAGE_MODELS.items()),
    Case("gpt2-checkpointed", gpt2_checkpointed, labelled, own_loss),
    Case("vit", vit, pictures, own_loss),
]
GPT2 = CASES[0]
# Their mixers give one function views of some parameters beside others.
RECURRENT = [Case(make.__name__, make, labelled, own_loss) for make in (mamba, mamba2, jamba)]
