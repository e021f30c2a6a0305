"""What is written at the end: the model, the adapter, or the model with the adapter merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetero.cli.finetune.options import FinetuneOptions
from hetero.cli.job.job import Job
from hetero.integrations.adapters import adapter_state, merged
from hetero.integrations.exports import export_into


def export(job: Job, options: FinetuneOptions, tokenizer: Any) -> None:
    """Writes the result to `options.output`. All ranks call it.

    Raises StoreError, OSError, ValueError.
    """
    folder, model = Path(options.output), job.model
    if not options.lora_rank or options.merge:
        whole = merged(model) if options.merge else model
        export_into(whole, folder, job.ranks.leads)
    elif job.ranks.leads:
        model.save_pretrained(folder, state_dict=adapter_state(model))  # type: ignore[operator]
    if job.ranks.leads:
        tokenizer.save_pretrained(folder)
