"""LoRA by PEFT, merged into the weights layer by layer, and exported as a whole model:

python docs/examples/merge_adapter.py MODEL_FOLDER WORK_FOLDER
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import hetero
from hetero.integrations.adapters import adapter_state, merged


def main(folder: str, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    with hetero.ZeroInitContext(placement_policy="nvme", host_memory="1GiB", nvme_path=str(work)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    model.train()
    optimizer = hetero.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = hetero.initialize(model, optimizer)
    for _ in range(2):
        tokens = torch.randint(0, 64, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(work / "adapter", state_dict=adapter_state(model))
    hetero.save_pretrained(merged(model), work / "merged")
    optimizer.engine.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
