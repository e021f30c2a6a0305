"""hetero/integrations/trainer as a mixin: TRL's SFTTrainer, with LoRA, beside itself."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from tests.support.ecosystem.tiny_models import ADAPTERS, arguments, figures
from tests.support.ecosystem.tiny_tokenizer import CHAT_TEMPLATE, model_folder
from tests.support.late import late

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="pip install 'hetero[ecosystem]'")
datasets, peft, trl, integration = map(
    late, ("datasets", "peft", "trl", "hetero.integrations.trainer")
)
AutoModelForCausalLM = late("transformers:AutoModelForCausalLM")
AutoTokenizer = late("transformers:AutoTokenizer")


def test_sft(tmp_path: Path) -> None:
    """(test_trainer.py resumes a training of adapters.)"""

    class SFT(integration.HeteroTrainerMixin, trl.SFTTrainer):  # type: ignore[misc,name-defined]
        pass

    folder = model_folder(tmp_path / "model", CHAT_TEMPLATE)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n}?"},
                {"role": "assistant", "content": "It is. " * (1 + n % 3)},
            ]
        }
        for n in range(16)
    ]

    def run(kind: Any, model: Any, name: str) -> Any:
        torch.manual_seed(11)
        config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **ADAPTERS)
        args = arguments(
            tmp_path / name, trl.SFTConfig, max_length=64, gradient_checkpointing=False, bf16=False
        )
        trainer = kind(
            model,
            args,
            train_dataset=datasets.Dataset.from_list(rows),
            eval_dataset=datasets.Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=config,
        )
        trainer.train()
        return trainer

    wanted = run(trl.SFTTrainer, AutoModelForCausalLM.from_pretrained(folder), "plain")
    with hetero.ZeroInitContext(placement_policy="nvme", dtype="fp32", nvme_path=str(tmp_path)):
        model = AutoModelForCausalLM.from_pretrained(folder)
    with run(SFT, model, "managed") as found:
        for name in ("loss", "eval_loss"):
            assert figures(found, name) == pytest.approx(figures(wanted, name), rel=1e-5)


def test_arguments_that_are_no_second_ones(tmp_path: Path) -> None:
    """DPOTrainer has its reference model there."""

    class DPO(integration.HeteroTrainerMixin, trl.DPOTrainer):  # type: ignore[misc,name-defined]
        pass

    folder = model_folder(tmp_path / "model", CHAT_TEMPLATE)
    rows = [
        {"prompt": f"What is {n}?", "chosen": " It is four.", "rejected": " The dog" * (1 + n % 3)}
        for n in range(16)
    ]
    args = arguments(
        tmp_path / "run",
        trl.DPOConfig,
        max_steps=2,
        eval_strategy="no",
        load_best_model_at_end=False,
        gradient_checkpointing=False,
        bf16=False,
    )

    def made(kind: Any, model: Any) -> Any:
        return kind(
            model,
            AutoModelForCausalLM.from_pretrained(folder),
            args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )

    wanted = made(trl.DPOTrainer, AutoModelForCausalLM.from_pretrained(folder))
    wanted.train()
    with hetero.ZeroInitContext(placement_policy="nvme", dtype="fp32", nvme_path=str(tmp_path)):
        model = AutoModelForCausalLM.from_pretrained(folder)
    with made(DPO, model) as found:
        found.train()
        for name in ("loss", "rewards/margins"):
            assert figures(found, name) == pytest.approx(figures(wanted, name), rel=1e-5)
    object.__setattr__(args, "fsdp", "full_shard")
    with pytest.raises(ValueError, match="shards and offloads the model itself"):
        made(DPO, AutoModelForCausalLM.from_pretrained(folder))


def test_its_own_loss_of_an_absent_head(tmp_path: Path) -> None:
    """TRL's head takes its weight past the module, and saves it for a backward of its own."""
    sft_trainer = pytest.importorskip("trl.trainer.sft_trainer")
    if not hasattr(sft_trainer, "add_fused_lm_head"):
        pytest.skip("this TRL has no loss of its own")
    folder = model_folder(tmp_path / "model", CHAT_TEMPLATE)
    tokens = torch.arange(2, 26).view(2, 12)
    losses: list[list[float]] = []
    for is_managed in (False, True):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        sft_trainer.add_fused_lm_head(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if is_managed:
            options: dict[str, Any] = {"placement_policy": "nvme", "nvme_path": str(tmp_path)}
            options |= {"host_memory": "160KiB", "chunk_numel": 4096, "dtype": "fp32"}
            optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.01)
            model, optimizer = hetero.initialize(model, optimizer, **options)
        found = []
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens, fused_lm_head=True).loss
            loss.backward()
            found.append(loss.item())
            del loss
            optimizer.step()
            optimizer.zero_grad()
        losses.append(found)
        if is_managed:
            optimizer.engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
