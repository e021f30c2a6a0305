"""hetero/compat/deepspeed/options: every key of a configuration, and what becomes of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.compat.deepspeed.config_keys import TABLES
from hetero.compat.deepspeed.options import DeepSpeedConfig, read_options
from hetero.compat.grad_scale import ScalePolicy
from hetero.compat.key_table import Treatment, forget_logged


def options_of(**top: Any) -> Any:
    return read_options(top).config


def zero(**keys: Any) -> Any:
    return options_of(zero_optimization=keys)


@pytest.mark.parametrize(("given", "stage"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_stages(given: int, stage: int) -> None:
    assert zero(stage=given).zero_stage == stage
    assert read_options({"zero_optimization": {"stage": given}}).zero_optimization_stage == given


def test_the_oldest_form_of_zero_optimization() -> None:
    assert read_options({"zero_optimization": True}).zero_optimization_stage == 1


@pytest.mark.parametrize("stage", [4, -1, "3", True])
def test_stages_that_are_none(stage: object) -> None:
    with pytest.raises(ValueError, match="stage must be one of 0, 1, 2, 3"):
        zero(stage=stage)


def test_where_state_lives(tmp_path: Path) -> None:
    path, other = str(tmp_path / "a"), str(tmp_path / "b")
    for each in (path, other):
        Path(each).mkdir()
    assert zero().placement_policy == "auto"
    assert zero(cpu_offload=True).placement_policy == "cpu"
    assert zero(cpu_offload_params=True).placement_policy == "cpu"
    assert zero(offload_optimizer={"device": "cpu"}).placement_policy == "cpu"
    assert zero(offload_optimizer={"device": "cpu", "ratio": 0.3}).placement_policy == "auto"
    assert zero(offload_param={"device": "none"}).placement_policy == "auto"
    on_disk = {"device": "nvme", "nvme_path": path}
    made = zero(offload_param={"device": "cpu"}, offload_optimizer=on_disk)
    assert (made.placement_policy, made.nvme_paths) == ("nvme", (path,))
    both = zero(offload_param=on_disk, offload_optimizer={"device": "nvme", "nvme_path": other})
    assert sorted(both.nvme_paths) == [path, other]
    new = Path(path) / "made" / "here"
    assert zero(offload_param={"device": "nvme", "nvme_path": str(new)}).nvme_paths == (str(new),)
    assert new.is_dir()
    with pytest.raises(hetero.StoreError):
        zero(offload_param={"device": "nvme", "nvme_path": "/proc/none"})
    with pytest.raises(ValueError, match="'nvme' needs nvme_path"):
        zero(offload_param={"device": "nvme"})
    with pytest.raises(ValueError, match="device must be none, cpu or nvme, not 'gpu'"):
        zero(offload_param={"device": "gpu"})


def test_dtypes() -> None:
    assert options_of().dtype == "fp32"
    assert options_of(bf16={"enabled": True}).dtype == "bf16"
    assert options_of(bfloat16={"enabled": True}).dtype == "bf16"
    made = options_of(fp16={"enabled": True}, bf16={"enabled": False})
    assert (made.dtype, made.initial_loss_scale) == ("fp16", None)
    made = options_of(bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    assert made.grad_dtype == "fp32"
    made = options_of(zero_optimization={"stage": 2}, communication_data_type="bf16")
    assert made.reduce_dtype == "bf16"
    with pytest.raises(ValueError, match="both enabled"):
        options_of(bf16={"enabled": True}, fp16={"enabled": True})
    with pytest.raises(ValueError, match="must be fp16, bf16 or fp32"):
        options_of(communication_data_type="int8")


def test_loss_scales() -> None:
    def policy(**keys: Any) -> Any:
        return read_options({"fp16": {"enabled": True, **keys}}).scale

    assert policy() == ScalePolicy(2.0**16, 1000, True, hysteresis=2)
    assert policy(loss_scale=128) == ScalePolicy.fixed(128.0)
    assert policy(
        initial_scale_power=8,
        loss_scale_window=5,
        hysteresis=3,
        consecutive_hysteresis=True,
        min_loss_scale=4,
    ) == ScalePolicy(256.0, 5, True, hysteresis=3, refills_hysteresis=True, least=4.0)
    with pytest.raises(ValueError, match="0 or more"):
        policy(loss_scale=-1)
    assert read_options({"bf16": {"enabled": True}}).scale == ScalePolicy.fixed(1.0)
    assert read_options({"bf16": {"bf16_optimizer_states": True}}).state_dtype == "bf16"
    assert read_options({"bf16": {"enabled": True, "check_grad_overflow": False}}).scale is None
    assert read_options({}).scale is None


@pytest.mark.parametrize(
    ("given", "ranks", "sizes"),
    [
        ({}, 1, (1, 1)),
        ({"train_batch_size": 8}, 2, (4, 1)),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, 2, (2, 2)),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, 1, (2, 4)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, 4, (3, 5)),
        ({"gradient_accumulation_steps": 5}, 4, (1, 5)),
    ],
)
def test_batch_sizes(given: dict[str, int], ranks: int, sizes: tuple[int, int]) -> None:
    made = read_options(given, ranks)
    assert (made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps) == sizes


def test_batch_sizes_that_contradict() -> None:
    with pytest.raises(ValueError, match="train_batch_size=8 is not .*=3 times .*=2 times 1"):
        read_options(
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 3,
                "gradient_accumulation_steps": 2,
            }
        )
    with pytest.raises(ValueError, match="train_batch_size=3 is not"):
        read_options({"train_batch_size": 3}, world=2)
    with pytest.raises(ValueError, match="an integer of at least 1"):
        read_options({"train_batch_size": 0})


def test_further_keys() -> None:
    made = read_options(
        {
            "gradient_clipping": 0.5,
            "steps_per_print": 10,
            "dataloader_drop_last": True,
            "activation_checkpointing": {"cpu_checkpointing": True},
            "zero_optimization": {"stage3_prefetch_bucket_size": 0, "mics_shard_size": 4},
            "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
            "hetero": {"host_memory": "1GiB", "zero_stage": 3},
        }
    )
    assert (made.gradient_clipping, made.steps_per_print, made.drop_last) == (0.5, 10, True)
    assert made.config.activation_memory == "auto"
    assert made.config.debugging.prefetch is False
    assert made.shard_size == 4
    assert made.optimizer is not None
    assert (made.config.host_memory, made.config.zero_stage) == (1 << 30, 3)
    assert zero(stage3_prefetch_bucket_size=1000).debugging.prefetch is True


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"zero_optimisation": {}}, "did you mean zero_optimization"),
        ({"activation_checkpointing": {"zzzzzzzz": 1}}, "in activation_checkpointing; known: "),
        ({"zero_optimization": {"stage3_prefetch_buket_size": 1}}, "stage3_prefetch_bucket_size"),
        ({"zero_optimization": {"offload_param": {"devise": 1}}}, "did you mean device"),
        ({"zero_optimization": {"zenflow": {"topk": 1}}}, "did you mean topk_ratio"),
        ({"fp16": {"loss_scal": 1}}, "did you mean loss_scale"),
        ({"aio": {"queue_dept": 1}}, "did you mean queue_depth"),
        ({"activation_checkpointing": {"cpu_checkpoint": 1}}, "did you mean cpu_checkpointing"),
        ({"optimizer": {"type": "Adam", "parms": {}}}, "did you mean params"),
        ({"optimizer": "Adam"}, "optimizer must have a type and params"),
        ({"hetero": {"host_memry": 1}}, "did you mean host_memory"),
        ({"hetero": "1GiB"}, "hetero must be a mapping"),
        ({"amp": {"enabled": True}}, "refused: use bf16 or fp16"),
        ({"curriculum_learning": {"enabled": True}}, "hetero has no such feature"),
        ({"gradient_clipping": "auto"}, "'auto', which Hugging Face's Trainer fills in"),
        ({"zero_optimization": 3}, "must be a mapping"),
        ({"zero_optimization": {"mics_shard_size": 0}}, "mics_shard_size must be an integer"),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"ratio": "x"}}},
            "ratio",
        ),
        ({"fp16": {"enabled": True, "hysteresis": 1.5}}, "hysteresis must be an integer"),
        ({"fp16": {"enabled": True, "initial_scale_power": "x"}}, "initial_scale_power must be"),
        ({"steps_per_print": "x"}, "steps_per_print must be an integer"),
        ({"checkpoint": {"load_universal": True}}, "hetero convert"),
        ({"checkpoint": {"tag_validations": "Warn"}}, "did you mean tag_validation"),
    ],
)
def test_what_cannot_be_is_refused(top: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(top)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert read_options(path).config == read_options(str(path)).config
    assert read_options(path).zero_optimization_stage == 2
    for content, message in (
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"fp16": {}, "fp16": {}}', "has fp16 more than once"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_options(path)
    with pytest.raises(ValueError, match="cannot read"):
        read_options(tmp_path / "none.json")


def test_every_key_is_read_or_named(caplog: pytest.LogCaptureFixture) -> None:
    """Those that are not needed are logged, with their reason, once."""
    forget_logged()
    with caplog.at_level(logging.WARNING, "hetero.compat"):
        for table in TABLES:
            for name, key in table.keys.items():
                found = table.read({name: 1}) if key.treatment is not Treatment.REFUSED else {}
                assert (name in found) == (key.treatment is Treatment.TAKEN)
                expected = f"{table.name}: {name} is not needed here, because {key.reason}"
                assert (expected in caplog.messages) == (key.treatment is Treatment.NOT_NEEDED)
    assert len(caplog.messages) == len(set(caplog.messages))
    for table in TABLES:
        assert not set(table.aliases) & set(table.keys)
        assert set(table.aliases.values()) <= set(table.keys)


def test_data_types() -> None:
    bf16 = {"enabled": True}
    given = {"grad_accum_dtype": "fp32", "param_dtype": "bf16", "buffer_dtype": "float16"}
    made = read_options({"bf16": bf16, "data_types": {**given, "keep_in_fp32_modules": []}})
    assert (made.config.grad_dtype, made.buffer_dtype) == ("fp32", torch.float16)
    for types, message in (
        ({"param_dtype": "fp32"}, "param_dtype=fp32 conflicts with fp16 and bf16: bf16"),
        ({"keep_in_fp32_modules": ["wo"]}, r"keep_in_fp32_modules=\['wo'\] is refused"),
    ):
        with pytest.raises(ValueError, match=message):
            read_options({"bf16": bf16, "data_types": types})


def test_sums_over_ranks_are_refused() -> None:
    assert read_options({"gradient_allreduce_op": "MEAN"}).managed_gradient_accumulation
    with pytest.raises(ValueError, match="multiply the loss by the number of ranks"):
        read_options({"gradient_allreduce_op": "sum"})


def test_the_numbers_that_are_asked_for_before_there_is_an_engine() -> None:
    made = DeepSpeedConfig({"train_batch_size": 8, "gradient_accumulation_steps": 2})
    sizes = (
        made.train_batch_size,
        made.train_micro_batch_size_per_gpu,
        made.gradient_accumulation_steps,
    )
    assert sizes == (8, 4, 2)
    assert (made.gradient_clipping, made.zero_enabled) == (1.0, False)
