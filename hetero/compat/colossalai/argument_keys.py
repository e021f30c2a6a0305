"""The arguments and configuration keys of ColossalAI, and what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero.compat.key_table import KeyTable, honoured, mapped, not_needed, refused
from hetero.config import option_names

_SEARCHED = "sizes of chunks and slots are searched (hetero: chunk_numel sets them)"
_EXACT = "ranks exchange parts and sum them in fp32, which needs no scaling and has fixed bits"
_FREE = "what a step leaves free on the device is found out and used (hetero: device_memory)"
_NO_SUCH = "hetero has no such feature"
_PAGE_LOCKED = "buffers to and from a device are always page-locked"
_RANKS = "the context that built the model knows the ranks"

INIT_CONTEXT = KeyTable(
    "ZeroInitContext",
    {
        "target_device": not_needed("placement_policy says where parameters live"),
        "shard_strategy": mapped("`shard_strategy`"),
        "shard_param": mapped("`zero_stage`: 3, or 2 if it is false"),
        "convert_fp16": mapped("`dtype`: fp16, or fp32 if it is false"),
        "seed": honoured("torch.manual_seed() at the block's beginning, undone at its end"),
        "default_dtype": honoured("parameters are drawn in it"),
        "model_numel_tensor": refused("sum(p.numel() for p in model.parameters()) counts them"),
        "convert_cuda": not_needed("placement_policy says where parameters live"),
        "shard_grad": not_needed("gradients are sharded from stage 2 on"),
        "rm_torch_payload_on_the_fly": not_needed("construction keeps to its budget always"),
        "replicated": not_needed("all parameters are"),
    },
)
SHARDED_MODEL = KeyTable(
    "ShardedModelV2",
    {
        "shard_strategy": mapped("`shard_strategy`"),
        "process_group": mapped("`process_group` of hetero.initialize()"),
        "tensor_placement_policy": mapped("`placement_policy`; cuda without a GPU: auto"),
        "fp32_reduce_scatter": mapped('`reduce_dtype="fp32"`'),
        "gradient_predivide_factor": not_needed(_EXACT),
        "reuse_fp16_shard": not_needed("gradients have homes of their own, and may accumulate"),
        "reduce_scatter_bucket_size_mb": not_needed(_SEARCHED),
        "reduce_scatter_process_group": not_needed(_RANKS),
        "use_memory_tracer": not_needed("the ledger counts every byte"),
        "offload_config": not_needed("tensor_placement_policy says it"),
        "reshard_after_forward": not_needed("slots are given up when others need them"),
        "mixed_precision": not_needed("masters are always kept in fp32"),
    },
)
_SCALE = {
    "initial_scale": honoured("the first loss scale"),
    "min_scale": honoured("its least"),
    "growth_factor": honoured("by which it grows"),
    "backoff_factor": honoured("by which it becomes smaller"),
    "growth_interval": honoured("steps without overflow until it grows"),
    "hysteresis": honoured("overflows until it becomes smaller"),
    "max_scale": honoured("its largest"),
}
SHARDED_OPTIMIZER = KeyTable(
    "ShardedOptimizerV2",
    {
        **_SCALE,
        "gpu_margin_mem_ratio": not_needed(_FREE),
        "dp_process_group": not_needed(_RANKS),
        "mp_process_group": not_needed("there is no model parallelism"),
        "cpu_offload": not_needed("tensor_placement_policy says it"),
        "verbose": not_needed("engine.explain() says what was chosen"),
    },
)
GEMINI = KeyTable(
    "GeminiDDP",
    {  # in the order in which ColossalAI takes them
        "chunk_config_dict": not_needed(_SEARCHED),
        "chunk_init_device": not_needed("placement_policy says it"),
        "placement_policy": mapped("`placement_policy`; static: by the two fractions below"),
        "enable_gradient_accumulation": not_needed("gradients always accumulate until zero_grad()"),
        "max_prefetch": not_needed("four uses are gathered ahead"),
        "shard_param_frac": mapped("`zero_stage`: 2 if it is 0, else 3"),
        "offload_optim_frac": mapped("static: 0 cuda, 1 cpu, between auto"),
        "offload_param_frac": mapped("static: above 0 cpu"),
        "warmup_non_model_data_ratio": not_needed(_FREE),
        "steady_cuda_cap_ratio": not_needed(_FREE),
        "search_range_m": not_needed(_SEARCHED),
        "hidden_dim": not_needed(_SEARCHED),
        "min_chunk_size_m": not_needed(_SEARCHED),
        "pin_memory": not_needed(_PAGE_LOCKED),
        "force_outputs_fp32": honoured("floating outputs become fp32"),
        "strict_ddp_mode": mapped("`zero_stage=1`"),
        "scatter_after_inference": not_needed("slots are given up when others need them"),
        "mixed_precision": mapped("`dtype`"),
        "zero_group": mapped("`process_group` of hetero.initialize()"),
        "memstats": not_needed(_FREE),
        "master_weights": not_needed("exact masters cost 2 bytes more than bf16"),
        "extra_dp_group": refused("give hetero.ZeroInitContext a mesh of two dimensions"),
        "verbose": not_needed("engine.explain() says what was chosen"),
        "enable_async_reduce": not_needed("communication overlaps with compute always"),
        "fp8_communication": refused(_NO_SUCH),
        "use_fp8": refused(_NO_SUCH),
        # Of earlier releases.
        "device": not_needed("parameters come to where compute happens"),
        "search_range_mb": not_needed(_SEARCHED),
        "min_chunk_size_mb": not_needed(_SEARCHED),
        "process_group": mapped("`process_group` of hetero.initialize()"),
    },
)
GEMINI_OPTIMIZER = KeyTable(
    "GeminiOptimizer",
    {  # in the order in which ColossalAI takes them
        "gpu_margin_mem_ratio": not_needed(_FREE),
        **_SCALE,
        "max_norm": honoured("step() clips the total norm"),
        "norm_type": honoured("2, or infinity"),
        "tp_group": refused(_NO_SUCH),
        "params_info": not_needed("parameters are known by their names"),
        "verbose": not_needed("engine.explain() says what was chosen"),
        "enable_async_reduce": not_needed("communication overlaps with compute always"),
    },
)
# What GeminiPlugin has beside the arguments of GeminiDDP and GeminiOptimizer.
PLUGIN = KeyTable(
    "GeminiPlugin",
    {
        "precision": mapped("`dtype`: fp16, bf16 or fp32"),
        "enable_tensor_parallelism": refused(_NO_SUCH),
        "tp_size": not_needed("there is no tensor parallelism"),
        "extra_dp_size": not_needed("there is no tensor parallelism"),
        "enable_all_optimization": refused("use models that are optimized already"),
        "enable_fused_normalization": refused("use models that are optimized already"),
        "enable_flash_attention": refused("use models that are optimized already"),
        "enable_jit_fused": refused("use models that are optimized already"),
        "enable_sequence_parallelism": refused(_NO_SUCH),
        "enable_sequence_overlap": refused(_NO_SUCH),
        **{
            name: key
            for table in (GEMINI, GEMINI_OPTIMIZER)
            for name, key in table.keys.items()
            if name not in ("mixed_precision", "tp_group", "params_info", "zero_group", "device")
        },
    },
)
CONFIGURATION = KeyTable(
    "the ColossalAI configuration",
    {
        "zero": honoured(
            "model_config for ShardedModelV2, optimizer_config for ShardedOptimizerV2"
        ),
        "gradient_accumulation": honoured("micro-batches between steps; losses are divided"),
        "clip_grad_norm": honoured("the total norm is clipped before each step"),
        "gradient_handler": not_needed("gradients are averaged as they come"),
        "cudnn_benchmark": honoured("torch.backends.cudnn.benchmark"),
        "cudnn_deterministic": honoured("torch.backends.cudnn.deterministic"),
        "parallel": refused("hetero has data parallelism alone"),
        "fp16": refused("the dtype is the context's (convert_fp16)"),
    },
)
TABLES = (
    INIT_CONTEXT,
    SHARDED_MODEL,
    SHARDED_OPTIMIZER,
    GEMINI,
    GEMINI_OPTIMIZER,
    PLUGIN,
    CONFIGURATION,
)


def by_name(table: KeyTable, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by their names, from those that were given by their order.

    Raises TypeError for one that is given twice, or for too many.
    """
    if len(positional) > len(table.keys):
        raise TypeError(f"{table.name}() takes {len(table.keys)} arguments, not {len(positional)}")
    ordered = dict(zip(table.keys, positional, strict=False))
    for name in ordered.keys() & named.keys():
        raise TypeError(f"{table.name}() got multiple values for argument {name!r}")
    return {**ordered, **named}


def read_arguments(
    table: KeyTable, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a call's honoured and mapped arguments, and hetero's own options in it.

    Raises ValueError for an unknown argument, with the nearest name, and for a refused one.
    """
    fields = set(option_names()) - set(table.keys)
    own = {name: value for name, value in given.items() if name in fields}
    return table.read({name: v for name, v in given.items() if name not in own}), own
