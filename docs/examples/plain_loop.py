"""A loop of one's own with checkpoints, a logger and an export:

    python docs/examples/plain_loop.py MODEL_FOLDER WORK_FOLDER

Run it again and it goes on from its last checkpoint.
"""

import sys
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import AutoModelForCausalLM

import hetero
from hetero.integrations.figures import step_figures


def main(folder: str, work: Path, steps: int = 4) -> None:
    work.mkdir(parents=True, exist_ok=True)
    with hetero.ZeroInitContext(placement_policy="nvme", host_memory="1GiB", nvme_path=str(work)):
        model = AutoModelForCausalLM.from_pretrained(folder)
    model.train()
    optimizer = hetero.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = hetero.initialize(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    begin = 0
    if hetero.latest_checkpoint(work / "checkpoints") is not None:
        found = hetero.load(work / "checkpoints", model, optimizer, extra={"scheduler": scheduler})
        begin = found.extra["step"]
    with SummaryWriter(str(work / "logs")) as logger:  # or wandb.init(), with logger.log(figures)
        for step in range(begin, steps):
            tokens = torch.randint(0, model.config.vocab_size, (2, 8))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            figures = {"loss": loss.item(), **step_figures(optimizer.engine)}
            for name, value in figures.items():
                logger.add_scalar(name, value, step)
            print(f"step {step + 1}: loss {loss.item():.3f}")
            extra = {"scheduler": scheduler, "step": step + 1}
            hetero.save(work / "checkpoints" / f"step-{step + 1}", model, optimizer, extra=extra)
    print(optimizer.engine.explain())
    hetero.save_pretrained(model, work / "tuned")
    optimizer.engine.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
