"""The keys of a DeepSpeed configuration, and what becomes of each."""

from __future__ import annotations

from hetero.compat.key_table import KeyTable, honoured, mapped, not_needed, refused

_SEARCHED = "sizes of chunks and slots are searched (hetero: chunk_numel sets them)"
_BUDGETS = "a budget in bytes limits what is gathered (hetero: device_memory)"
_TOGETHER = "small parameters share a chunk with others, and travel with them"
_EXACT = "ranks exchange parts and sum them in fp32, which needs no scaling and has fixed bits"
_COMMUNICATION = "communication overlaps with compute always, in an order that the ranks agree on"
_IO_ENGINE = "the I/O engine keeps the disk's queue full by itself (io_uring, or threads)"
_PIPELINE = "the step pipeline always reads, updates and writes several tiles at a time"
_PAGE_LOCKED = "buffers to and from a device are always page-locked"
_NO_SUCH = "hetero has no such feature"
_MONITOR = "log what engine.step() leaves in get_lr() and get_global_grad_norm()"
_MEASURE = "optimizer.engine.explain() and `hetero train --timeline` say where time and memory go"

TOP = KeyTable(
    "the DeepSpeed configuration",
    {
        "train_batch_size": honoured("checked against the two below and the number of ranks"),
        "train_micro_batch_size_per_gpu": honoured("the batch size of the loader"),
        "gradient_accumulation_steps": honoured("micro-batches between steps; losses are divided"),
        "managed_gradient_accumulation": honoured("false: every step() updates"),
        "gradient_clipping": honoured("the total norm is clipped before each step; absent: to 1.0"),
        "gradient_allreduce_op": honoured('"mean"; "sum" is refused'),
        "log_level": honoured("of the logger hetero.compat"),
        "optimizer": honoured("Adam, AdamW, Lion, Adagrad, SGD"),
        "scheduler": honoured("LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR"),
        "fp16": honoured("see fp16"),
        "bf16": honoured("see bf16"),
        "zero_optimization": honoured("see zero_optimization"),
        "activation_checkpointing": honoured("see activation_checkpointing"),
        "aio": honoured("see aio"),
        "data_types": honoured("see data_types"),
        "communication_data_type": mapped("`reduce_dtype`"),
        "dataloader_drop_last": honoured("the loader leaves out the last, smaller batch"),
        "steps_per_print": honoured("steps and learning rates are logged, logger hetero.compat"),
        "hetero": honoured("hetero's own options, as `host_memory`; they go before all others"),
        "checkpoint": honoured("see checkpoint"),
        "prescale_gradients": not_needed(_EXACT),
        "gradient_predivide_factor": not_needed(_EXACT),
        "disable_allgather": not_needed(_COMMUNICATION),
        "sparse_gradients": not_needed("gradients are dense"),
        "zero_allow_untested_optimizer": not_needed("optimizers that cannot be used are refused"),
        "zero_force_ds_cpu_optimizer": not_needed("updates run where optimizer state is"),
        "wall_clock_breakdown": not_needed(_MEASURE),
        "memory_breakdown": not_needed(_MEASURE),
        "flops_profiler": not_needed(_MEASURE),
        "comms_logger": not_needed("optimizer.engine.traffic counts the bytes"),
        "dump_state": not_needed("optimizer.engine.notes and explain() say what was chosen"),
        "timers": not_needed(_MEASURE),
        "disable_python_gc": not_needed("gc.disable() says it"),
        "vocabulary_size": not_needed("nothing is padded"),
        "graph_harvesting": not_needed("parameters move, which a CUDA graph cannot follow"),
        "seq_parallel_comm_data_type": not_needed("there is no sequence parallelism"),
        "use_data_before_expert_parallelism": not_needed("there is no expert parallelism"),
        "amp": refused("use bf16 or fp16"),
        "torch_autocast": refused("use torch.autocast itself, or bf16"),
        "tensor_parallel": refused(_NO_SUCH),
        "expert_parallel": refused(_NO_SUCH),
        "sequence_parallel_size": refused(_NO_SUCH),
        "pipeline": refused(_NO_SUCH),
        "hybrid_engine": refused("call model.generate() as it is"),
        "compile": refused("call torch.compile(model) instead"),
        "elasticity": refused("checkpoints and durable state load with any number of ranks"),
        "autotuning": refused("`hetero plan` says what to choose"),
        "nebula": refused("hetero.save(..., blocking=False) saves during training"),
        "datastates_ckpt": refused("hetero.save(..., blocking=False) saves during training"),
        **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), refused(_MONITOR)),
        "sparse_attention": refused(_NO_SUCH),
        "data_efficiency": refused(_NO_SUCH),
        "curriculum_learning": refused(_NO_SUCH),
        "compression_training": refused(_NO_SUCH),
        "quantize_training": refused(_NO_SUCH),
        "weight_quantization": refused(_NO_SUCH),
        "progressive_layer_drop": refused(_NO_SUCH),
        "eigenvalue": refused(_NO_SUCH),
    },
    {"bfloat16": "bf16"},
)

ZERO = KeyTable(
    "zero_optimization",
    {
        "stage": mapped("`zero_stage`; 0 becomes 1, the same numbers with less memory"),
        "offload_optimizer": mapped("`placement_policy` and `nvme_path`, see offload_optimizer"),
        "offload_param": mapped("`placement_policy` and `nvme_path`, see offload_param"),
        "cpu_offload": mapped('`placement_policy="cpu"`'),
        "cpu_offload_param": mapped('`placement_policy="cpu"`'),
        "stage3_prefetch_bucket_size": mapped(
            "0: `prefetch=False`; else not needed: four uses are gathered ahead"
        ),
        "mics_shard_size": mapped("a mesh: shards within this number of ranks, replicas across"),
        "contiguous_gradients": not_needed("gradients always lie in chunks"),
        "overlap_comm": not_needed(_COMMUNICATION),
        "reduce_scatter": not_needed("each rank always gets the means of its own parts alone"),
        "reduce_bucket_size": not_needed(_SEARCHED),
        "allgather_bucket_size": not_needed(_SEARCHED),
        "allgather_partitions": not_needed("parameters are always gathered by all-gathers"),
        "use_multi_rank_bucket_allreduce": not_needed("a bucket is a chunk, of all ranks"),
        "parameter_alignment": not_needed("parameters lie at aligned places of chunks"),
        "compute_grad_norm": not_needed("a norm is computed where one is clipped or read"),
        "round_robin_gradients": not_needed("every rank has an equal part of every chunk"),
        "sub_group_size": not_needed("an update's unit is a tile, and " + _SEARCHED),
        "stage3_max_live_parameters": not_needed(_BUDGETS),
        "stage3_max_reuse_distance": not_needed("the slot whose next use is farthest is given up"),
        "stage3_param_persistence_threshold": not_needed(_TOGETHER),
        "stage3_model_persistence_threshold": not_needed(_TOGETHER),
        "stage3_module_granularity_threshold": not_needed(_TOGETHER),
        "stage3_use_all_reduce_for_fetch_params": not_needed(_COMMUNICATION),
        "stage3_allgather_sequential": not_needed("chunks are gathered into slots, without a copy"),
        "stage3_partition_stream_chunk_size": not_needed("zero.Init keeps to the budget of RAM"),
        "stage3_gather_16bit_weights_on_model_save": not_needed("state_dict() is always whole"),
        "stage3_gather_fp16_weights_on_model_save": not_needed("state_dict() is always whole"),
        "cpu_offload_use_pin_memory": not_needed(_PAGE_LOCKED),
        "ignore_unused_parameters": not_needed("a parameter without gradient is not updated"),
        "legacy_stage1": not_needed("there is one engine for all stages"),
        "elastic_checkpoint": not_needed("checkpoints load with any number of ranks"),
        "load_from_fp32_weights": not_needed("checkpoints have fp32 masters, which are loaded"),
        "pipeline_loading_checkpoint": not_needed("checkpoints load in pieces of a few MiB"),
        "memory_efficient_linear": not_needed("saved parameters hold no memory"),
        "override_module_apply": not_needed("parameters come in wherever they are used"),
        "log_trace_cache_warnings": not_needed("changed orders of modules cost no correctness"),
        "enable_sanity_checks": not_needed("invariants are always checked"),
        "leaf_module": not_needed("parameters come in wherever they are used"),
        "save_muon_momentum_buffer_in_memory": not_needed("a budget says what stays in RAM"),
        "zero_hpz_partition_size": not_needed("ranks of a machine read each other's memory"),
        "zero_quantized_weights": not_needed("gathers are exact"),
        "zero_quantized_nontrainable_weights": not_needed("gathers are exact"),
        "zero_quantized_gradients": not_needed(
            "means are exact (hetero: reduce_dtype halves them)"
        ),
        "zeropp_loco_param": not_needed("there is no error of quantization to compensate"),
        "mics_hierarchical_params_gather": not_needed(
            "ranks of a machine read each other's memory"
        ),
        "zenflow": honoured("see zenflow"),
    },
    {
        "cpu_offload_params": "cpu_offload_param",
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        # As DeepSpeed's tutorial spells it.
        "stage3_param_persitance_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential": "stage3_allgather_sequential",
        "partition_stream_chunk_size": "stage3_partition_stream_chunk_size",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    },
)

_OFFLOAD = {
    "device": mapped("none, cpu, nvme: `placement_policy`"),
    "nvme_path": mapped("`nvme_path`"),
    "pin_memory": not_needed(_PAGE_LOCKED),
    "buffer_count": not_needed(_SEARCHED),
}
OFFLOAD_PARAM = KeyTable(
    "offload_param",
    {
        **_OFFLOAD,
        "buffer_size": not_needed(_SEARCHED),
        "max_in_cpu": not_needed("RAM keeps as many parameters as its budget has room for"),
    },
)
OFFLOAD_OPTIMIZER = KeyTable(
    "offload_optimizer",
    {
        **_OFFLOAD,
        "ratio": mapped('less than 1: `placement_policy="auto"`, the device keeps what fits'),
        "pipeline": not_needed(_PIPELINE),
        "pipeline_read": not_needed(_PIPELINE),
        "pipeline_write": not_needed(_PIPELINE),
        "fast_init": not_needed("first states are zeros, which are not read"),
        "super_offload": not_needed(_PIPELINE),
        "convert_grad_on_cpu": not_needed("kernels take gradients as they are"),
        "cpuadam_cores_perc": not_needed("ranks share the CPUs (hetero.set_threads sets them)"),
    },
)
FP16 = KeyTable(
    "fp16",
    {
        "enabled": mapped('`dtype="fp16"`'),
        "loss_scale": honoured("0: dynamic; else this scale, always"),
        "initial_scale_power": honoured("the first scale is 2 to this power"),
        "loss_scale_window": honoured("steps without overflow after which the scale doubles"),
        "hysteresis": honoured("overflows before the scale is halved"),
        "consecutive_hysteresis": honoured("a step without overflow fills the hysteresis again"),
        "min_loss_scale": honoured("the scale is not halved below it"),
        "auto_cast": not_needed("inputs of the model are always cast"),
        "fused_mode": not_needed("there is one kernel"),
        "fp16_master_weights_and_grads": not_needed(
            "masters are fp32, so that small updates count"
        ),
    },
)
BF16 = KeyTable(
    "bf16",
    {
        "enabled": mapped('`dtype="bf16"`'),
        "bf16_optimizer_states": mapped('`state_dtype="bf16"` of the optimizer'),
        "immediate_grad_update": not_needed("gradients are taken in as they come"),
        "check_grad_overflow": honoured(
            "a step whose gradients are not finite is left out; absent: it is"
        ),
        "bf16_master_weights_and_grads": not_needed("an exact master costs 2 bytes more than bf16"),
    },
)
DATA_TYPES = KeyTable(
    "data_types",
    {
        "grad_accum_dtype": mapped("`grad_dtype`"),
        "param_dtype": honoured("must be that of fp16 or bf16"),
        "buffer_dtype": honoured("buffers are cast to it; absent: they keep theirs"),
        "keep_in_fp32_modules": honoured('"auto" or []; patterns of names are refused'),
    },
)
ACTIVATIONS = KeyTable(
    "activation_checkpointing",
    {
        "cpu_checkpointing": mapped('`activation_memory="auto"`'),
        "partition_activations": not_needed("there is no model parallelism to partition over"),
        "contiguous_memory_optimization": not_needed("what leaves goes to slots of equal size"),
        "number_checkpoints": not_needed("nothing is preallocated for them"),
        "synchronize_checkpoint_boundary": not_needed("streams wait for events alone"),
        "profile": not_needed(_MEASURE),
    },
)
AIO = KeyTable(
    "aio",
    {
        "block_size": not_needed(_IO_ENGINE),
        "queue_depth": not_needed(_IO_ENGINE),
        "thread_count": not_needed(_IO_ENGINE),
        "intra_op_parallelism": not_needed(_IO_ENGINE),
        "single_submit": not_needed(_IO_ENGINE),
        "overlap_events": not_needed(_IO_ENGINE),
        "use_gds": not_needed("what goes between NVMe and a GPU passes through RAM"),
    },
)
_EXACT_UPDATES = "exact updates of all elements overlap with backward and the next forward"
ZENFLOW = KeyTable(
    "zenflow",
    {
        name: not_needed(_EXACT_UPDATES)
        for name in (
            "topk_ratio",
            "select_strategy",
            "select_interval",
            "update_interval",
            "overlap_step",
            "offload",
            "auto_ratio",
            "full_warm_up_rounds",
            "pt_reserved_cores_perc",
            "steps_per_epoch",
        )
    },
)
_WHOLE = "a checkpoint is whole or absent, and loads with any number of ranks"
CHECKPOINT = KeyTable(
    "checkpoint",
    {
        "tag_validation": not_needed(_WHOLE),
        "parallel_write": not_needed("each rank always writes its part"),
        "writer": not_needed("each rank always writes its part"),
        "load_universal": refused("`hetero convert` reads universal checkpoints"),
        "use_node_local_storage": refused("all ranks must see one folder"),
    },
)
TABLES = (
    TOP,
    ZERO,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    FP16,
    BF16,
    DATA_TYPES,
    ACTIVATIONS,
    CHECKPOINT,
    AIO,
    ZENFLOW,
)
