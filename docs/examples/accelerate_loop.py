"""A plain loop of Hugging Face's Accelerate, which saves its state and goes on from it:

python docs/examples/accelerate_loop.py MODEL_FOLDER WORK_FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import hetero
from hetero.integrations.accelerator import Accelerator  # from accelerate import Accelerator


def main(folder: str, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.train()
    optimizer = hetero.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = hetero.initialize(
        model, optimizer, placement_policy="nvme", host_memory="1GiB", nvme_path=str(work)
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    tokens = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(tokens, batch_size=2)
    engine = optimizer.engine
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if (work / "state").is_dir():
        accelerator.load_state(str(work / "state"))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
    accelerator.save_state(str(work / "state"))
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
