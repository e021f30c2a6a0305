"""The arguments and configuration keys of ColossalAI, and what becomes of each.

docs/compatibility.md says what those that are taken do.
"""

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
    taken="seed default_dtype shard_strategy shard_param convert_fp16",
    not_needed={
        _PLACEMENT: "target_device convert_cuda",
        _ENGINE: "shard_grad rm_torch_payload_on_the_fly replicated",
    },
    refused={"sum(p.numel() for p in model.parameters()) counts them": "model_numel_tensor"},
)
SHARDED_MODEL = KeyTable(
    "ShardedModelV2",
    taken="shard_strategy process_group tensor_placement_policy fp32_reduce_scatter",
    not_needed={
        _ENGINE: """gradient_predivide_factor reuse_fp16_shard use_memory_tracer mixed_precision
            reshard_after_forward""",
        _SEARCHED: "reduce_scatter_bucket_size_mb",
        _RANKS: "reduce_scatter_process_group",
        _PLACEMENT: "offload_config",
    },
)
_SCALE = "initial_scale min_scale growth_factor backoff_factor growth_interval hysteresis max_scale"
SHARDED_OPTIMIZER = KeyTable(
    "ShardedOptimizerV2",
    taken=_SCALE,
    not_needed={
        _FREE: "gpu_margin_mem_ratio",
        _RANKS: "dp_process_group mp_process_group",
        _PLACEMENT: "cpu_offload",
        _ENGINE: "verbose",
    },
)
GEMINI = KeyTable(
    "GeminiDDP",
    taken="""force_outputs_fp32 placement_policy shard_param_frac offload_optim_frac
        offload_param_frac strict_ddp_mode mixed_precision zero_group process_group""",
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
    taken=f"{_SCALE} max_norm norm_type",
    not_needed={_FREE: "gpu_margin_mem_ratio", _ENGINE: "params_info verbose enable_async_reduce"},
    refused={_NO_SUCH: "tp_group"},
)
_NOT_OF_PLUGIN = ("mixed_precision", "tp_group", "params_info", "zero_group", "device")
PLUGIN = KeyTable(
    "GeminiPlugin",
    taken="precision",
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
    taken="zero gradient_accumulation clip_grad_norm cudnn_benchmark cudnn_deterministic",
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
