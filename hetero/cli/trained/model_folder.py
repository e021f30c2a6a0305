"""Where the model is that a run has left: a folder that transformers reads."""

from __future__ import annotations

from pathlib import Path

from hetero.cli.job.run_folder import MODEL_NAME


def model_folder(path: Path | None) -> Path:
    """The folder of the model that `path` means: itself, or that of the run which it is.

    None means the newest run in `runs` that left a model. Raises ValueError if there is none.
    """
    if path is None:
        runs = [run / MODEL_NAME for run in Path("runs").glob("*")]
        found = [folder for folder in runs if _is_model(folder)]
        if not found:
            raise ValueError(
                "no run in the folder runs has left a model; name a folder, or train one: "
                "hetero train"
            )
        return max(found, key=lambda folder: (folder / "config.json").stat().st_mtime)
    for folder in (path, path / MODEL_NAME):
        if _is_model(folder):
            return folder
    raise ValueError(
        f"{path} is neither a model folder (config.json and safetensors files) nor a run folder "
        f"that has one; hetero convert makes one of a checkpoint"
    )


def _is_model(folder: Path) -> bool:
    """Whether there are weights, or an adapter that names the folder of the weights."""
    names = ("config.json", "adapter_config.json")
    return any((folder / name).is_file() for name in names) and any(folder.glob("*.safetensors"))
