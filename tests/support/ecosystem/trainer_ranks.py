"""A Trainer on the ranks of torchrun: once through, and from its checkpoint on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from transformers import AutoModelForCausalLM

import hetero
from hetero.integrations.trainer import Trainer
from tests.support.ecosystem.tiny_models import Sentences, arguments, figures


def main(folder: Path, path: Path) -> None:
    """Writes the losses of both runs to `path`."""
    found = {}
    for name in ("whole", "resumed"):
        with hetero.ZeroInitContext(placement_policy="nvme", dtype="fp32", nvme_path=str(path)):
            model = AutoModelForCausalLM.from_pretrained(folder)
        args = arguments(path / "out", ddp_backend="gloo", max_grad_norm=1.0)
        with Trainer(model, args, train_dataset=Sentences(), eval_dataset=Sentences()) as trainer:
            checkpoint = str(path / "out" / "checkpoint-4") if name == "resumed" else None
            trainer.train(resume_from_checkpoint=checkpoint)
            assert trainer.engine is not None
            assert trainer.engine.world.size == 2
            found[name] = figures(trainer, "loss")
            if trainer.is_world_process_zero():
                (path / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
