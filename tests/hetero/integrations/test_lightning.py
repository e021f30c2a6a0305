"""hetero/integrations/lightning: a module beside itself with torch.optim.AdamW."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from tests.support.ecosystem.tiny_models import Sentences, gpt2_folder
from tests.support.late import late

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="pip install 'hetero[ecosystem]'"
)
lightning, AutoModelForCausalLM = late("lightning"), late("transformers:AutoModelForCausalLM")
HeteroStrategy = late("hetero.integrations.lightning:HeteroStrategy")


def module_of(folder: Path, kind: Any) -> Any:
    """The folder's model as a module whose optimizer is of the kind."""

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(folder)
            self.model.train()
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = kind(self.parameters(), lr=1e-2, weight_decay=0.0)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    return Module()


def fit(module: Any, path: Path, strategy: Any, epochs: int = 2, ckpt_path: Any = None) -> Any:
    torch.manual_seed(5)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        default_root_dir=path,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(dirpath=path, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Without workers, whose seeds would be drawn.
    loader = torch.utils.data.DataLoader(Sentences(), batch_size=4)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def test_a_module_and_its_checkpoints(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path / "model")
    plain = module_of(folder, torch.optim.AdamW)
    fit(plain, tmp_path / "plain", "auto")
    runs = []
    for resumed in (False, True):
        with hetero.ZeroInitContext(
            placement_policy="cpu" if resumed else "nvme", dtype="fp32", nvme_path=str(tmp_path)
        ):
            module = module_of(folder, hetero.HybridAdam)
        strategy = HeteroStrategy()
        checkpoint = next((tmp_path / "run").glob("epoch=0*")) if resumed else None
        fit(module, tmp_path / ("again" if resumed else "run"), strategy, ckpt_path=checkpoint)
        assert strategy.engine is not None
        runs.append((module.losses, hetero.masters(module.parameters())))
        strategy.close()
    assert runs[0][0] == pytest.approx(plain.losses, rel=1e-5)
    assert runs[1][0] == runs[0][0][4:]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


def test_a_module_that_was_built_outside(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path / "model")
    module = module_of(folder, hetero.HybridAdam)
    strategy = HeteroStrategy(placement_policy="cpu", dtype="fp32")
    trainer = fit(module, tmp_path / "run", strategy, epochs=1)
    assert strategy.engine is not None
    trainer.save_checkpoint(tmp_path / "last")
    assert hetero.latest_checkpoint(tmp_path / "last") == tmp_path / "last" / "hetero"
    strategy.close()
    other = module_of(folder, torch.optim.AdamW)
    refusing = HeteroStrategy()
    with pytest.raises(ValueError, match="the optimizer must be one of hetero's"):
        fit(other, tmp_path / "other", refusing)
    refusing.close()  # it has no engine
    with pytest.raises(hetero.CheckpointError, match="is no folder that HeteroStrategy"):
        again = module_of(folder, hetero.HybridAdam)
        fit(again, tmp_path / "x", HeteroStrategy(), ckpt_path=tmp_path / "model")


def test_a_module_that_is_fitted_twice(tmp_path: Path) -> None:
    """By one optimizer, as a search for a learning rate and the training after it are."""
    folder = gpt2_folder(tmp_path / "model")
    losses = []
    for kind in (torch.optim.AdamW, hetero.HybridAdam):
        module, made = module_of(folder, kind), kind is hetero.HybridAdam
        module.model.eval()  # without dropout, whose random numbers the search would draw
        kept = kind(module.parameters(), lr=1e-2, weight_decay=0.0)
        module.configure_optimizers = lambda kept=kept: kept
        options = {"placement_policy": "nvme", "dtype": "fp32", "nvme_path": str(tmp_path)}
        trainer = lightning.Trainer(
            max_epochs=1,
            strategy=HeteroStrategy(**options) if made else "auto",
            accelerator="cpu",
            devices=1,
            default_root_dir=tmp_path / kind.__name__,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader(Sentences(), batch_size=4)
        tuner = lightning.pytorch.tuner.Tuner(trainer)
        tuner.lr_find(module, loader, num_training=3, early_stop_threshold=None, update_attr=False)
        for group in kept.param_groups:
            group["lr"] = 1e-2
        trainer.fit(module, loader)
        losses.append(module.losses)
    assert len(losses[0]) == 3 + 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    module.configure_optimizers = lambda: hetero.HybridAdam(module.parameters())
    with pytest.raises(hetero.HeteroError, match=r"earlier fit\(\).*have configure_opt"):
        trainer.fit(module, loader)
    trainer.strategy.close()


def test_averages_of_weights_are_what_a_checkpoint_gives(tmp_path: Path) -> None:
    """A resumed run goes on from both, with masters as they were; a test takes the averages."""
    if not hasattr(lightning.pytorch.callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no averages of weights")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.losses: list[float] = []

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = (self(batch[0]) - 1).square().mean()
            self.losses.append(loss.item())
            return loss

        test_step = training_step

        def configure_optimizers(self) -> Any:
            return hetero.HybridSGD(self.parameters(), lr=0.25)

    def ema() -> Any:
        return lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.5)

    def trainer(epochs: int, *callbacks: Any) -> Any:
        strategy = HeteroStrategy(placement_policy="cpu", dtype="bf16")
        return lightning.Trainer(
            max_epochs=epochs,
            strategy=strategy,
            callbacks=list(callbacks),
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=len(callbacks) > 1,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def masters(module: Any) -> list[torch.Tensor]:
        return hetero.masters(module.parameters())

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)
    torch.manual_seed(3)
    modules = [Module() for _ in range(3)]
    modules[1].load_state_dict(modules[0].state_dict())
    saving = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    cut, whole, resumed = trainer(1, ema()), trainer(2, ema(), saving), trainer(2, ema())
    cut.fit(modules[0], loader)
    averages = masters(modules[0])  # with which fit() ends
    whole.fit(modules[1], loader)
    resumed.fit(modules[2], loader, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert modules[2].losses == modules[1].losses[4:]
    assert all(map(torch.equal, masters(modules[2]), masters(modules[1])))
    trainer(1).test(modules[2], loader, ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    for master, average in zip(masters(modules[2]), averages, strict=True):
        assert torch.equal(master.bfloat16(), average.bfloat16())
    with pytest.raises(hetero.HeteroError, match="only a module that fit.. has initialized takes"):
        trainer(1).test(Module(), loader, ckpt_path=tmp_path / "epoch=0.ckpt")
    for each in (cut, whole, resumed):
        each.strategy.close()


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_a_precision_that_casts_the_module_is_refused(precision: str, tmp_path: Path) -> None:
    module = module_of(gpt2_folder(tmp_path / "model"), hetero.HybridAdam)
    trainer = lightning.Trainer(
        strategy=HeteroStrategy(), accelerator="cpu", devices=1, precision=precision, logger=False
    )
    with pytest.raises(ValueError, match=f"precision='{precision}' casts the module.*dtype='bf16'"):
        trainer.fit(module, torch.utils.data.DataLoader(Sentences(), batch_size=4))


def test_a_library_without_weights_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.6."""
    from lightning.pytorch.strategies import SingleDeviceStrategy

    read: list[Path] = []

    def load_checkpoint(self: Any, checkpoint_path: Path) -> None:
        read.append(checkpoint_path)

    monkeypatch.setattr(SingleDeviceStrategy, "load_checkpoint", load_checkpoint)
    (tmp_path / "hetero").mkdir()
    HeteroStrategy().load_checkpoint(tmp_path)
    assert read == [tmp_path / "lightning.ckpt"]
