"""The keys of a DeepSpeed configuration, and what becomes of each.

docs/compatibility.md says what those that are taken do.
"""

from __future__ import annotations

from hetero.compat.key_table import KeyTable

_ENGINE = "the engine does it, or does without it, by itself"
_EXACT = "ranks exchange parts and sum them in fp32: exact, with fixed bits"
_EXPLAIN = "optimizer.engine.explain(), .notes, .traffic and `hetero train --timeline` say it"
_LAYOUT = "chunks have all parameters and gradients, in equal parts for the ranks"
_NO_SUCH = "hetero has no such feature"
_SEARCHED = "sizes are searched within a budget in bytes (hetero: device_memory, chunk_numel)"

TOP = KeyTable(
    "the DeepSpeed configuration",
    taken="""train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
        managed_gradient_accumulation gradient_clipping gradient_allreduce_op log_level optimizer
        scheduler fp16 bf16 zero_optimization activation_checkpointing data_types checkpoint aio
        dataloader_drop_last steps_per_print hetero communication_data_type""",
    not_needed={
        _EXACT: "prescale_gradients gradient_predivide_factor",
        _ENGINE: """disable_allgather sparse_gradients zero_allow_untested_optimizer vocabulary_size
            zero_force_ds_cpu_optimizer graph_harvesting""",
        _EXPLAIN: """wall_clock_breakdown memory_breakdown flops_profiler timers comms_logger
            dump_state""",
        "gc.disable() says it": "disable_python_gc",
        "there is data parallelism alone": """seq_parallel_comm_data_type
            use_data_before_expert_parallelism""",
    },
    refused={
        "use bf16 or fp16": "amp torch_autocast",
        "call model.generate() as it is": "hybrid_engine",
        "call torch.compile(model) instead": "compile",
        "checkpoints and durable state load with any number of ranks": "elasticity",
        "`hetero plan` says what to choose": "autotuning",
        "hetero.save(..., blocking=False) saves during training": "nebula datastates_ckpt",
        "log what engine.step() leaves in get_lr() and get_global_grad_norm()": """tensorboard wandb
            csv_monitor comet""",
        _NO_SUCH: """tensor_parallel expert_parallel sequence_parallel_size pipeline
            sparse_attention data_efficiency curriculum_learning compression_training
            quantize_training weight_quantization progressive_layer_drop eigenvalue""",
    },
    aliases={"bfloat16": "bf16"},
)
# Keys of zero_optimization that may be written without "stage3_".
_WITHOUT_STAGE = """prefetch_bucket_size max_live_parameters max_reuse_distance
    param_persistence_threshold model_persistence_threshold module_granularity_threshold
    use_all_reduce_for_fetch_params allgather_sequential partition_stream_chunk_size
    gather_16bit_weights_on_model_save"""
ZERO = KeyTable(
    "zero_optimization",
    taken="""stage offload_optimizer offload_param cpu_offload cpu_offload_param zenflow
        stage3_prefetch_bucket_size mics_shard_size""",
    not_needed={
        _LAYOUT: """contiguous_gradients reduce_scatter allgather_partitions parameter_alignment
            use_multi_rank_bucket_allreduce round_robin_gradients legacy_stage1
            stage3_param_persistence_threshold stage3_model_persistence_threshold
            stage3_module_granularity_threshold stage3_allgather_sequential
            stage3_use_all_reduce_for_fetch_params""",
        _SEARCHED: """reduce_bucket_size allgather_bucket_size sub_group_size
            stage3_max_live_parameters stage3_max_reuse_distance
            stage3_partition_stream_chunk_size""",
        _ENGINE: """overlap_comm compute_grad_norm cpu_offload_use_pin_memory
            ignore_unused_parameters memory_efficient_linear override_module_apply leaf_module
            log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
            zero_hpz_partition_size mics_hierarchical_params_gather""",
        "state_dict() is always whole": """stage3_gather_16bit_weights_on_model_save
            stage3_gather_fp16_weights_on_model_save""",
        "checkpoints have fp32 masters, and load in pieces, with any number of ranks": """
            elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint""",
        _EXACT: """zero_quantized_weights zero_quantized_nontrainable_weights
            zero_quantized_gradients zeropp_loco_param""",
    },
    aliases={
        "cpu_offload_params": "cpu_offload_param",
        # As DeepSpeed's tutorial spells it.
        "stage3_param_persitance_threshold": "stage3_param_persistence_threshold",
        **{name: f"stage3_{name}" for name in _WITHOUT_STAGE.split()},
    },
)

OFFLOAD_PARAM = KeyTable(
    "offload_param",
    taken="device nvme_path",
    not_needed={_ENGINE: "pin_memory", _SEARCHED: "buffer_count buffer_size max_in_cpu"},
)
OFFLOAD_OPTIMIZER = KeyTable(
    "offload_optimizer",
    taken="device nvme_path ratio",
    not_needed={
        _SEARCHED: "buffer_count",
        _ENGINE: """pin_memory pipeline pipeline_read pipeline_write super_offload fast_init
            convert_grad_on_cpu""",
        "ranks share the CPUs (hetero.set_threads sets them)": "cpuadam_cores_perc",
    },
)
FP16 = KeyTable(
    "fp16",
    taken="""enabled loss_scale initial_scale_power loss_scale_window hysteresis
        consecutive_hysteresis min_loss_scale""",
    not_needed={
        "inputs are always cast, by one kernel, and masters are fp32": """auto_cast fused_mode
            fp16_master_weights_and_grads"""
    },
)
BF16 = KeyTable(
    "bf16",
    taken="enabled check_grad_overflow bf16_optimizer_states",
    not_needed={
        "an exact master costs 2 bytes more than bf16": "bf16_master_weights_and_grads",
        _ENGINE: "immediate_grad_update",
    },
)
DATA_TYPES = KeyTable(
    "data_types",
    taken="param_dtype buffer_dtype keep_in_fp32_modules grad_accum_dtype",
)
ACTIVATIONS = KeyTable(
    "activation_checkpointing",
    taken="cpu_checkpointing",
    not_needed={
        "there is data parallelism alone": "partition_activations",
        _ENGINE: """contiguous_memory_optimization number_checkpoints
            synchronize_checkpoint_boundary""",
        _EXPLAIN: "profile",
    },
)
AIO = KeyTable(
    "aio",
    not_needed={
        "the I/O engine keeps the disk's queue full by itself": """block_size queue_depth
            thread_count intra_op_parallelism single_submit overlap_events""",
        "data between NVMe and a GPU pass through RAM": "use_gds",
    },
)
ZENFLOW = KeyTable(
    "zenflow",
    not_needed={
        "exact updates of all elements overlap with backward and the next forward": """topk_ratio
            select_strategy select_interval update_interval overlap_step offload auto_ratio
            full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"""
    },
)
CHECKPOINT = KeyTable(
    "checkpoint",
    not_needed={
        "a checkpoint is whole or absent, and each rank writes its part": """tag_validation writer
            parallel_write"""
    },
    refused={
        "`hetero convert` reads universal checkpoints": "load_universal",
        "all ranks must see one folder": "use_node_local_storage",
    },
)
TABLES = (
    *(TOP, ZERO, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, FP16, BF16),
    *(DATA_TYPES, ACTIVATIONS, CHECKPOINT, AIO, ZENFLOW),
)
