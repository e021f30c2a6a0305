"""Hugging Face's Trainer, with TrainingArguments as they are, and LoRA:

    python docs/examples/trainer.py MODEL_FOLDER WORK_FOLDER

With `torchrun --nproc-per-node N` the ranks shard the model.
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import hetero
from hetero.integrations.trainer import Trainer  # from transformers import Trainer


def main(folder: str, work: Path, steps: int = 4) -> None:
    work.mkdir(parents=True, exist_ok=True)
    tokens = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": each, "labels": each} for each in tokens]
    with hetero.ZeroInitContext(placement_policy="nvme", host_memory="1GiB", nvme_path=str(work)):
        model = AutoModelForCausalLM.from_pretrained(folder)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    arguments = TrainingArguments(
        output_dir=str(work / "out"),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        logging_steps=1,
        report_to=[],  # or ["tensorboard"], ["wandb"]: each log has hetero's figures, too
        use_cpu=not torch.cuda.is_available(),
    )
    with Trainer(model, arguments, train_dataset=data, eval_dataset=data) as trainer:
        last = get_last_checkpoint(work / "out") if (work / "out").is_dir() else None
        trainer.train(resume_from_checkpoint=last)
        print(trainer.evaluate())
        trainer.save_model(str(work / "adapter"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
