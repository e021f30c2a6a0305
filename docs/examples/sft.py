"""TRL's SFTTrainer on conversations:

python docs/examples/sft.py MODEL_FOLDER WORK_FOLDER
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

import hetero
from hetero.integrations.trainer import HeteroTrainerMixin


class HeteroSFTTrainer(HeteroTrainerMixin, SFTTrainer):
    pass


def main(folder: str, work: Path, steps: int = 2) -> None:
    work.mkdir(parents=True, exist_ok=True)
    conversation = [
        {"role": "user", "content": "What is two and two?"},
        {"role": "assistant", "content": "It is four."},
    ]
    data = Dataset.from_list([{"messages": conversation}] * 16)
    with hetero.ZeroInitContext(placement_policy="nvme", host_memory="1GiB", nvme_path=str(work)):
        model = AutoModelForCausalLM.from_pretrained(folder)
    on_cpu = not torch.cuda.is_available()
    arguments = SFTConfig(
        output_dir=str(work / "out"),
        max_steps=steps,
        max_length=64,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=on_cpu,
        bf16=not on_cpu,
    )
    with HeteroSFTTrainer(model, arguments, train_dataset=data) as trainer:
        trainer.train()
        trainer.save_model(str(work / "tuned"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
