"""The keys of a DeepSpeed configuration, and what becomes of each."""

from __future__ import annotations

from hetero.compat.key_table import KeyTable

_SEARCHED = "sizes of chunks and slots are searched (hetero: chunk_numel sets them)"
_BUDGETS = "a budget in bytes limits what is gathered (hetero: device_memory)"
_EXACT = "ranks exchange parts and sum them in fp32, which needs no scaling and has fixed bits"
_COMMUNICATION = "communication overlaps with compute always, in an order that the ranks agree on"
_IO_ENGINE = "the I/O engine keeps the disk's queue full by itself (io_uring, or threads)"
_PIPELINE = "the step pipeline always reads, updates and writes several tiles at a time"
_PAGE_LOCKED = "buffers to and from a device are always page-locked"
_WHEREVER = "parameters come in wherever they are used"
_NO_SUCH = "hetero has no such feature"
_MONITOR = "log what engine.step() leaves in get_lr() and get_global_grad_norm()"
_MEASURE = "optimizer.engine.explain() and `hetero train --timeline` say where time and memory go"

TOP = KeyTable(
    "the DeepSpeed configuration",
    honoured={
        "train_batch_size": "checked against the two below and the number of ranks",
        "train_micro_batch_size_per_gpu": "the batch size of the loader",
        "gradient_accumulation_steps": "micro-batches between steps; losses are divided",
        "managed_gradient_accumulation": "false: every step() updates",
        "gradient_clipping": "the total norm is clipped before each step; absent: to 1.0",
        "gradient_allreduce_op": '"mean"; "sum" is refused',
        "log_level": "of the logger hetero.compat",
        "optimizer": "Adam, AdamW, Lion, Adagrad, SGD",
        "scheduler": "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR",
        "fp16": "see fp16",
        "bf16": "see bf16",
        "zero_optimization": "see zero_optimization",
        "activation_checkpointing": "see activation_checkpointing",
        "aio": "see aio",
        "data_types": "see data_types",
        "dataloader_drop_last": "the loader leaves out the last, smaller batch",
        "steps_per_print": "steps and learning rates are logged, logger hetero.compat",
        "hetero": "hetero's own options, as `host_memory`; they go before all others",
        "checkpoint": "see checkpoint",
    },
    mapped={"communication_data_type": "`reduce_dtype`"},
    not_needed={
        _EXACT: "prescale_gradients gradient_predivide_factor",
        _COMMUNICATION: "disable_allgather",
        "gradients are dense": "sparse_gradients",
        "optimizers that cannot be used are refused": "zero_allow_untested_optimizer",
        "updates run where optimizer state is": "zero_force_ds_cpu_optimizer",
        _MEASURE: "wall_clock_breakdown memory_breakdown flops_profiler timers",
        "optimizer.engine.traffic counts the bytes": "comms_logger",
        "optimizer.engine.notes and explain() say what was chosen": "dump_state",
        "gc.disable() says it": "disable_python_gc",
        "nothing is padded": "vocabulary_size",
        "parameters move, which a CUDA graph cannot follow": "graph_harvesting",
        "there is data parallelism alone": """seq_parallel_comm_data_type
            use_data_before_expert_parallelism""",
    },
    refused={
        "use bf16 or fp16": "amp",
        "use torch.autocast itself, or bf16": "torch_autocast",
        "call model.generate() as it is": "hybrid_engine",
        "call torch.compile(model) instead": "compile",
        "checkpoints and durable state load with any number of ranks": "elasticity",
        "`hetero plan` says what to choose": "autotuning",
        "hetero.save(..., blocking=False) saves during training": "nebula datastates_ckpt",
        _MONITOR: "tensorboard wandb csv_monitor comet",
        _NO_SUCH: """tensor_parallel expert_parallel sequence_parallel_size pipeline
            sparse_attention data_efficiency curriculum_learning compression_training
            quantize_training weight_quantization progressive_layer_drop eigenvalue""",
    },
    aliases={"bfloat16": "bf16"},
)

ZERO = KeyTable(
    "zero_optimization",
    honoured={"zenflow": "see zenflow"},
    mapped={
        "stage": "`zero_stage`; 0 becomes 1, the same numbers with less memory",
        "offload_optimizer": "`placement_policy` and `nvme_path`, see offload_optimizer",
        "offload_param": "`placement_policy` and `nvme_path`, see offload_param",
        "cpu_offload": '`placement_policy="cpu"`',
        "cpu_offload_param": '`placement_policy="cpu"`',
        "stage3_prefetch_bucket_size": (
            "0: `prefetch=False`; else not needed: four uses are gathered ahead"
        ),
        "mics_shard_size": "a mesh: shards within this number of ranks, replicas across",
    },
    not_needed={
        "gradients always lie in chunks": "contiguous_gradients",
        _COMMUNICATION: "overlap_comm stage3_use_all_reduce_for_fetch_params",
        "each rank always gets the means of its own parts alone": "reduce_scatter",
        _SEARCHED: "reduce_bucket_size allgather_bucket_size sub_group_size",
        "parameters are always gathered by all-gathers": "allgather_partitions",
        "a bucket is a chunk, of all ranks": "use_multi_rank_bucket_allreduce",
        "parameters lie at aligned places of chunks": "parameter_alignment",
        "a norm is computed where one is clipped or read": "compute_grad_norm",
        "every rank has an equal part of every chunk": "round_robin_gradients",
        _BUDGETS: "stage3_max_live_parameters",
        "the slot whose next use is farthest is given up": "stage3_max_reuse_distance",
        "small parameters share a chunk with others, and travel with them": """
            stage3_param_persistence_threshold stage3_model_persistence_threshold
            stage3_module_granularity_threshold""",
        "chunks are gathered into slots, without a copy": "stage3_allgather_sequential",
        "zero.Init keeps to the budget of RAM": "stage3_partition_stream_chunk_size",
        "state_dict() is always whole": """stage3_gather_16bit_weights_on_model_save
            stage3_gather_fp16_weights_on_model_save""",
        _PAGE_LOCKED: "cpu_offload_use_pin_memory",
        "a parameter without gradient is not updated": "ignore_unused_parameters",
        "there is one engine for all stages": "legacy_stage1",
        "checkpoints load with any number of ranks": "elastic_checkpoint",
        "checkpoints have fp32 masters, which are loaded": "load_from_fp32_weights",
        "checkpoints load in pieces of a few MiB": "pipeline_loading_checkpoint",
        "saved parameters hold no memory": "memory_efficient_linear",
        _WHEREVER: "override_module_apply leaf_module",
        "changed orders of modules cost no correctness": "log_trace_cache_warnings",
        "invariants are always checked": "enable_sanity_checks",
        "a budget says what stays in RAM": "save_muon_momentum_buffer_in_memory",
        "ranks of a machine read each other's memory": """zero_hpz_partition_size
            mics_hierarchical_params_gather""",
        "gathers are exact": "zero_quantized_weights zero_quantized_nontrainable_weights",
        "means are exact (hetero: reduce_dtype halves them)": """zero_quantized_gradients
            zeropp_loco_param""",
    },
    aliases={
        "cpu_offload_params": "cpu_offload_param",
        # As DeepSpeed's tutorial spells it.
        "stage3_param_persitance_threshold": "stage3_param_persistence_threshold",
        **{
            name: f"stage3_{name}"
            for name in (
                "prefetch_bucket_size",
                "max_live_parameters",
                "max_reuse_distance",
                "param_persistence_threshold",
                "model_persistence_threshold",
                "module_granularity_threshold",
                "use_all_reduce_for_fetch_params",
                "allgather_sequential",
                "partition_stream_chunk_size",
                "gather_16bit_weights_on_model_save",
            )
        },
    },
)

_OFFLOAD = {"device": "none, cpu, nvme: `placement_policy`", "nvme_path": "`nvme_path`"}
OFFLOAD_PARAM = KeyTable(
    "offload_param",
    mapped=_OFFLOAD,
    not_needed={
        _PAGE_LOCKED: "pin_memory",
        _SEARCHED: "buffer_count buffer_size",
        "RAM keeps as many parameters as its budget has room for": "max_in_cpu",
    },
)
OFFLOAD_OPTIMIZER = KeyTable(
    "offload_optimizer",
    mapped={
        **_OFFLOAD,
        "ratio": 'less than 1: `placement_policy="auto"`, the device keeps what fits',
    },
    not_needed={
        _PAGE_LOCKED: "pin_memory",
        _SEARCHED: "buffer_count",
        _PIPELINE: "pipeline pipeline_read pipeline_write super_offload",
        "first states are zeros, which are not read": "fast_init",
        "kernels take gradients as they are": "convert_grad_on_cpu",
        "ranks share the CPUs (hetero.set_threads sets them)": "cpuadam_cores_perc",
    },
)
FP16 = KeyTable(
    "fp16",
    honoured={
        "loss_scale": "0: dynamic; else this scale, always",
        "initial_scale_power": "the first scale is 2 to this power",
        "loss_scale_window": "steps without overflow after which the scale doubles",
        "hysteresis": "overflows before the scale is halved",
        "consecutive_hysteresis": "a step without overflow fills the hysteresis again",
        "min_loss_scale": "the scale is not halved below it",
    },
    mapped={"enabled": '`dtype="fp16"`'},
    not_needed={
        "inputs of the model are always cast": "auto_cast",
        "there is one kernel": "fused_mode",
        "masters are fp32, so that small updates count": "fp16_master_weights_and_grads",
    },
)
BF16 = KeyTable(
    "bf16",
    honoured={
        "check_grad_overflow": "a step whose gradients are not finite is left out; absent: it is"
    },
    mapped={
        "enabled": '`dtype="bf16"`',
        "bf16_optimizer_states": '`state_dtype="bf16"` of the optimizer',
    },
    not_needed={
        "gradients are taken in as they come": "immediate_grad_update",
        "an exact master costs 2 bytes more than bf16": "bf16_master_weights_and_grads",
    },
)
DATA_TYPES = KeyTable(
    "data_types",
    honoured={
        "param_dtype": "must be that of fp16 or bf16",
        "buffer_dtype": "buffers are cast to it; absent: they keep theirs",
        "keep_in_fp32_modules": '"auto" or []; patterns of names are refused',
    },
    mapped={"grad_accum_dtype": "`grad_dtype`"},
)
ACTIVATIONS = KeyTable(
    "activation_checkpointing",
    mapped={"cpu_checkpointing": '`activation_memory="auto"`'},
    not_needed={
        "there is no model parallelism to partition over": "partition_activations",
        "what leaves goes to slots of equal size, and nothing is preallocated": """
            contiguous_memory_optimization number_checkpoints""",
        "streams wait for events alone": "synchronize_checkpoint_boundary",
        _MEASURE: "profile",
    },
)
AIO = KeyTable(
    "aio",
    not_needed={
        _IO_ENGINE: """block_size queue_depth thread_count intra_op_parallelism single_submit
            overlap_events""",
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
        "a checkpoint is whole or absent, and loads with any number of ranks": "tag_validation",
        "each rank always writes its part": "parallel_write writer",
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
