"""`compile` (DeepCompile) and `hybrid_engine` (generation inside training)."""

from __future__ import annotations

from dstrain.config.keys.key import BOOL, INT, LIST, TEXT, Key, flag, row, section, switch

COMPILE = "compile/config.py: CompileConfig"
HYBRID = "runtime/config.py: HybridEngineConfig"

# fmt: off
COMPILING: tuple[Key, ...] = (
    *section("compile", COMPILE,
        "DeepCompile; takes effect only if engine.compile() is called (Trainer: torch_compile).", since="0.16.6")(
        flag("deepcompile", "Inserts ZeRO's communication into the compiled graph; stages 1 to 3."),
        flag("autoep_non_moe", "AutoEP: compiles everything except the MoE layers, which stay eager.", since="0.19.8"),
        flag("free_activation",
            "Frees large activations in the graph as early as possible; incompatible with inductor."),
        row("free_activation_threshold", INT, "Smallest tensor that free_activation frees, in bytes.",
            default=10_485_760, since="0.18.0"),
        flag("offload_activation",
            "Moves saved activations of 5 MB and more to host memory; incompatible with offload_parameters and "
            "offload_opt_states."),
        row("offload_activation_pin_memory", BOOL, "Page-locks that host memory for faster copies.", default=True,
            since="0.19.6"),
        flag("offload_opt_states",
            "Keeps optimizer states in host memory outside the step; for one accumulation step."),
        row("double_buffer", BOOL, "Uses two buffers in reductions, so that filling and sending overlap.",
            default=True),
        flag("symmetric_memory", "Uses torch's symmetric memory for gathers."),
        flag("debug_log", "Writes the graphs before and after each pass."),
        flag("offload_parameters",
            "Keeps parameters in host memory between uses; enabled automatically if both offload sections are "
            "present."),
        flag("sync_before_reduce", "Synchronizes before each reduction; for debugging."),
        flag("sync_after_reduce", "Synchronizes after each reduction; for debugging."),
        flag("sync_before_allgather", "Synchronizes before each gather; for debugging."),
        flag("sync_after_allgather", "Synchronizes after each gather; for debugging."),
        row("keep_int_input_tensors", BOOL,
            "Keeps the real values of integer inputs for profiling, which index operations need.", default=True,
            since="0.17.2"),
        flag("keep_all_input_tensors", "Keeps the real values of all inputs for profiling; more memory.",
            since="0.17.2"),
    ),
    *section("compile.passes", COMPILE,
        "Passes to run instead of the stage's defaults; autotp cannot be combined with others.", kind=LIST,
        is_nullable=True, since="0.18.9")(
        row("*", TEXT, "One pass.", words=("z1", "z3", "autosp", "autotp")),
    ),
    *section("hybrid_engine", HYBRID, "Switches between training and fast generation, as RLHF needs.")(
        switch(),
        row("max_out_tokens", INT, "Tokens of prompt and answer that the cache is sized for.", default=512, least=1),
        row("inference_tp_size", INT, "GPUs that split the model during generation.", default=1),
        flag("release_inference_cache", "Frees the generation cache before training resumes; less memory, slower."),
        row("pin_parameters", BOOL, "Keeps gathered parameters during a whole generation (stage 3).", default=True),
        row("tp_gather_partition_size", INT, "Layers gathered at a time for generation (stage 3).", default=8),
        flag("enable_cuda_graph", "Replays generation as a CUDA graph; incompatible with stage 3.", since="0.19.6"),
    ),
)
# fmt: on
