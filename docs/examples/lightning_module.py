"""A LightningModule, whose state hetero keeps:

python docs/examples/lightning_module.py MODEL_FOLDER WORK_FOLDER
"""

import sys
from pathlib import Path

import lightning
import torch
from transformers import AutoModelForCausalLM

import hetero
from hetero.integrations.lightning import HeteroStrategy


class Tuning(lightning.LightningModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder).train()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return hetero.AdamW(self.parameters(), lr=1e-3)


def main(folder: str, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    with hetero.ZeroInitContext(placement_policy="nvme", host_memory="1GiB", nvme_path=str(work)):
        module = Tuning(folder)
    tokens = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(0))
    strategy = HeteroStrategy()
    trainer = lightning.Trainer(
        max_epochs=1,
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        default_root_dir=work,
        logger=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(tokens, batch_size=2))
    hetero.save_pretrained(module.model, work / "tuned")
    strategy.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
