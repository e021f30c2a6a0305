"""The arguments and configuration keys of ColossalAI, and what becomes of each."""

from __future__ import annotations

from hetero.compat.key_table import KeyTable

_ENGINE = "the engine does it, or does without it, by itself"
_FREE = "what a step leaves free on the device is found out and used (hetero: device_memory)"
_NO_SUCH = "hetero has no such feature"
_PLACEMENT = "the placement policy says where parameters live"
_RANKS = "the context that built the model knows the ranks"
_SEARCHED = "sizes of chunks and slots are searched (hetero: chunk_numel sets them)"

INIT_CONTEXT = KeyTable(
    "ZeroInitContext",
    honoured={
        "seed": "torch.manual_seed() at the block's beginning, undone at its end",
        "default_dtype": "parameters are drawn in it",
    },
    mapped={
        "shard_strategy": "`shard_strategy`",
        "shard_param": "`zero_stage`: 3, or 2 if it is false",
        "convert_fp16": "`dtype`: fp16, or fp32 if it is false",
    },
    not_needed={
        _PLACEMENT: "target_device convert_cuda",
        _ENGINE: "shard_grad rm_torch_payload_on_the_fly replicated",
    },
    refused={"sum(p.numel() for p in model.parameters()) counts them": "model_numel_tensor"},
)
SHARDED_MODEL = KeyTable(
    "ShardedModelV2",
    mapped={
        "shard_strategy": "`shard_strategy`",
        "process_group": "`process_group` of hetero.initialize()",
        "tensor_placement_policy": "`placement_policy`; cuda without a GPU: auto",
        "fp32_reduce_scatter": '`reduce_dtype="fp32"`',
    },
    not_needed={
        _ENGINE: """gradient_predivide_factor reuse_fp16_shard use_memory_tracer mixed_precision
            reshard_after_forward""",
        _SEARCHED: "reduce_scatter_bucket_size_mb",
        _RANKS: "reduce_scatter_process_group",
        _PLACEMENT: "offload_config",
    },
)
_SCALE = {
    "initial_scale": "the first loss scale",
    "min_scale": "its least",
    "growth_factor": "by which it grows",
    "backoff_factor": "by which it becomes smaller",
    "growth_interval": "steps without overflow until it grows",
    "hysteresis": "overflows until it becomes smaller",
    "max_scale": "its largest",
}
SHARDED_OPTIMIZER = KeyTable(
    "ShardedOptimizerV2",
    honoured=_SCALE,
    not_needed={
        _FREE: "gpu_margin_mem_ratio",
        _RANKS: "dp_process_group mp_process_group",
        _PLACEMENT: "cpu_offload",
        _ENGINE: "verbose",
    },
)
GEMINI = KeyTable(
    "GeminiDDP",
    honoured={"force_outputs_fp32": "floating outputs become fp32"},
    mapped={
        "placement_policy": "`placement_policy`; static: by the two fractions below",
        "shard_param_frac": "`zero_stage`: 2 if it is 0, else 3",
        "offload_optim_frac": "static: 0 cuda, 1 cpu, between auto",
        "offload_param_frac": "static: above 0 cpu",
        "strict_ddp_mode": "`zero_stage=1`",
        "mixed_precision": "`dtype`",
        "zero_group": "`process_group` of hetero.initialize()",
        "process_group": "its older name",
    },
    not_needed={
        _SEARCHED: """chunk_config_dict search_range_m hidden_dim min_chunk_size_m search_range_mb
            min_chunk_size_mb""",
        _PLACEMENT: "chunk_init_device device",
        _FREE: "warmup_non_model_data_ratio steady_cuda_cap_ratio memstats",
        _ENGINE: """enable_gradient_accumulation max_prefetch pin_memory scatter_after_inference
            master_weights verbose enable_async_reduce""",
    },
    refused={
        "give hetero.ZeroInitContext a mesh of two dimensions": "extra_dp_group",
        _NO_SUCH: "fp8_communication use_fp8",
    },
)
GEMINI_OPTIMIZER = KeyTable(
    "GeminiOptimizer",
    honoured={**_SCALE, "max_norm": "step() clips the total norm", "norm_type": "2, or infinity"},
    not_needed={_FREE: "gpu_margin_mem_ratio", _ENGINE: "params_info verbose enable_async_reduce"},
    refused={_NO_SUCH: "tp_group"},
)
_NOT_OF_PLUGIN = ("mixed_precision", "tp_group", "params_info", "zero_group", "device")
PLUGIN = KeyTable(
    "GeminiPlugin",
    mapped={"precision": "`dtype`: fp16, bf16 or fp32"},
    not_needed={"there is no tensor parallelism": "tp_size extra_dp_size"},
    refused={
        "use models that are optimized already": """enable_all_optimization
            enable_fused_normalization enable_flash_attention enable_jit_fused""",
        _NO_SUCH: "enable_tensor_parallelism enable_sequence_parallelism enable_sequence_overlap",
    },
    others={
        name: key
        for name, key in (GEMINI.keys | GEMINI_OPTIMIZER.keys).items()
        if name not in _NOT_OF_PLUGIN
    },
)
CONFIGURATION = KeyTable(
    "the ColossalAI configuration",
    honoured={
        "zero": "model_config for ShardedModelV2, optimizer_config for ShardedOptimizerV2",
        "gradient_accumulation": "micro-batches between steps; losses are divided",
        "clip_grad_norm": "the total norm is clipped before each step",
        "cudnn_benchmark": "torch.backends.cudnn.benchmark",
        "cudnn_deterministic": "torch.backends.cudnn.deterministic",
    },
    not_needed={"gradients are averaged as they come": "gradient_handler"},
    refused={
        "hetero has data parallelism alone": "parallel",
        "the dtype is the context's (convert_fp16)": "fp16",
    },
)
TABLES = (
    *(INIT_CONTEXT, SHARDED_MODEL, SHARDED_OPTIMIZER),
    *(GEMINI, GEMINI_OPTIMIZER, PLUGIN, CONFIGURATION),
)
