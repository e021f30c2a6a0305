"""The projects whose own tests can be run over hetero's adapters, a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

from bench.peers_tests import overlays


@dataclass(frozen=True)
class Peer:
    """A project, the modules that stand in for its own, and its tests.

    Attributes:
        tests: the ones that are run by default, relative to `folder`.
        folder: where the project's tests are run, relative to its repository.
        stand_ins: a package of the project, and the package of hetero that has its names. Imports
            of the former, and of all below it, get the latter's modules; a name that hetero has
            not is a Missing, which raises NotThere when it is used.
        overlays: changes a module of another project after it was imported (by its full name).
        internals: a regular expression: an AttributeError that it matches is about the project's
            own insides.
    """

    tests: tuple[str, ...]
    folder: str = "tests"
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    overlays: Mapping[str, Callable[[ModuleType], None]] = field(default_factory=dict)
    internals: str = r"(?!)"


def _tests(text: str) -> tuple[str, ...]:
    """Test files, from lines of a folder and of names without `test_` and `.py`."""
    lines = (line.split() for line in text.strip().splitlines())
    return tuple(f"{folder}/test_{name}.py" for folder, *names in lines for name in names)


# Models of ColossalAI's tests that no test here uses, and that other packages or the network bring.
_OTHER_MODELS = (
    "diffusers timm torchaudio torchvision transformers.albert transformers.blip2"
    " transformers.bloom transformers.chatglm2 transformers.command transformers.deepseek"
    " transformers.deepseek_v3"
    " transformers.falcon transformers.gptj transformers.llama transformers.mistral"
    " transformers.mixtral transformers.opt transformers.qwen2 transformers.qwen3 transformers.sam"
    " transformers.t5 transformers.vit transformers.whisper"
)

PEERS: Mapping[str, Peer] = {
    "deepspeed": Peer(
        _tests("""
            unit/runtime lr_schedulers ds_config_dict no_sync_ctxt ds_initialize
            unit/runtime/zero zero_tiled zero_tensor_fragment zero_dynamic_class zero_nesting_init
            unit/runtime/zero zero_context_ancestry zero_context_return zero_context
            unit/runtime/zero ignore_unused_parameters unwrap_model zero_late_module_attach
            unit/runtime/zero zero_grad_clip nvme_checkpointing
            unit/v1/half_precision gradient_clipping_default
            unit/v1/zero offload_states zero_user_backward zero_cpu_offload_grad_accum
            unit/v1/zero zero2_offload_multi_backward
            unit/checkpoint latest_checkpoint zero_optimizer
            unit/ops/adam cpu_adam
            unit/ops/lion cpu_lion
            unit/ops/adagrad cpu_adagrad
            unit/ops/muon muon
        """),
        stand_ins={"deepspeed": "hetero.compat.deepspeed"},
        overlays={
            "torch.nn.parallel.distributed": overlays.without_device_ids,
            "unit.common": overlays.failures_are_errors,
        },
        internals=r"\b_?ds_|SimpleNamespace|(in|out)_parts|tput_timer|'_\w+'|bit16|fp16_groups"
        r"|fp32_(groups|partitioned)|averaged_gradients|partition_count|leaf_parameters"
        r"|needs_scaler|optimizer_swapper|parameter_offload|accumulated_grads|ipg_|flatten"
        r"|no attribute .optimizer.|persistent_parameters|_subgroup|eigenvalue|git_hash"
        r"|Builder. object",
    ),
    # Its tests compare Gemini with apex and DistributedDataParallel on GPUs. Here they run on the
    # CPU: what they take of their own test kit comes from the checkout, apex is a loop with fp32
    # masters, and of the values that a test goes through each is taken once, not each combination.
    "colossalai": Peer(
        _tests("""
            tests/test_zero/test_gemini optim grad_clip grad_accum inference zeroddp_state_dict
            tests/test_zero/test_gemini zerooptim_state_dict gemini_use_rmt runtime_mem_tracer
            tests/test_zero/test_gemini search chunk_mgrv2 chunkv2
            tests/test_optimizer adam_kernel adam_optim lr_scheduler nvme
        """),
        folder=".",
        stand_ins={
            "colossalai": "hetero.compat.colossalai",
            "apex": "bench.peers_tests.apex",
            **{f"tests.kit.model_zoo.{n}": f"bench.peers_tests.{n}" for n in _OTHER_MODELS.split()},
        },
        overlays={
            "torch.nn.parallel.distributed": overlays.without_device_ids,
            "torch.nn.modules.module": overlays.stays("Module"),
            "torch._tensor": overlays.stays("Tensor"),
            "torch.cuda": overlays.device_is_cpu,
        },
        internals=r"chunk_manager|grads_device",
    ),
    "accelerate": Peer(
        _tests(". scheduler state_checkpointing optimizer grad_sync"),
        overlays={"accelerate": overlays.accelerator},
        internals=r"has no attribute '_\w+'",
    ),
    "transformers": Peer(
        _tests("""
            tests/trainer trainer trainer_optimizers trainer_checkpointing trainer_callback
            tests/trainer trainer_evaluation
        """),
        folder=".",
        overlays={
            "transformers.trainer": overlays.trainer,
            "tests.trainer.trainer_test_utils": overlays.trainer_checkpoints,
        },
    ),
    # Tests of fully_shard(), on the CPU. Ranks are processes, two at most; where the tests' ranks
    # are threads, there is one.
    "pytorch": Peer(
        _tests("""
            . fully_shard_init fully_shard_state fully_shard_training fully_shard_clip_grad_norm_
            . fully_shard_frozen fully_shard_grad_scaler fully_shard_state_dict
            . fully_shard_ignore_params
        """),
        folder="test/distributed/_composable/fsdp",
        overlays={
            "torch.distributed.fsdp": overlays.fully_shard,
            "torch.optim": overlays.optimizers_of_shards,
            "torch.testing._internal.common_distributed": overlays.without_gpus,
            "torch.testing._internal.common_fsdp": overlays.whole_values,
        },
        internals=r"full_tensor|to_local|_local_tensor|_spec|placements|device_mesh|'_\w+'|'state'",
    ),
}
