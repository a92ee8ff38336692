"""`compile` (DeepCompile) and `hybrid_engine` (generation inside training)."""

from __future__ import annotations

from dstrain.config.keys.key import Key, Kind

COMPILE = "compile/config.py: CompileConfig"
HYBRID = "runtime/config.py: HybridEngineConfig"

# fmt: off
COMPILING: tuple[Key, ...] = (
    Key(path="compile", kind=Kind.OBJECT, since="0.16.6", source=COMPILE,
        meaning="DeepCompile; takes effect only when engine.compile() is called (HF: torch_compile)."),
    Key(path="compile.deepcompile", kind=Kind.BOOL, default=False, since="0.16.6", source=COMPILE,
        meaning="Puts ZeRO's communication into the compiled graph; stages 1 to 3."),
    Key(path="compile.autoep_non_moe", kind=Kind.BOOL, default=False, since="0.19.8", source=COMPILE,
        meaning="AutoEP: compiles what is around the MoE layers and leaves those eager."),
    Key(path="compile.free_activation", kind=Kind.BOOL, default=False, since="0.16.6", source=COMPILE,
        meaning="Frees large activations in the graph as early as possible; not with inductor."),
    Key(path="compile.free_activation_threshold", kind=Kind.INT, default=10_485_760, since="0.18.0", source=COMPILE,
        meaning="Bytes from which free_activation takes a tensor."),
    Key(path="compile.offload_activation", kind=Kind.BOOL, default=False, since="0.16.6", source=COMPILE,
        meaning="Moves saved activations of 5 MB and more to host memory; not with offload_parameters or "
        "offload_opt_states."),
    Key(path="compile.offload_activation_pin_memory", kind=Kind.BOOL, default=True, since="0.19.6", source=COMPILE,
        meaning="Page-locks that host memory: faster copies."),
    Key(path="compile.offload_opt_states", kind=Kind.BOOL, default=False, since="0.16.6", source=COMPILE,
        meaning="Keeps optimizer states in host memory outside the step; for accumulation of 1."),
    Key(path="compile.double_buffer", kind=Kind.BOOL, default=True, since="0.16.6", source=COMPILE,
        meaning="Two buffers in reductions, so that filling and sending overlap."),
    Key(path="compile.symmetric_memory", kind=Kind.BOOL, default=False, since="0.16.6", source=COMPILE,
        meaning="Uses torch's symmetric memory in gathers."),
    Key(path="compile.debug_log", kind=Kind.BOOL, default=False, since="0.16.6", source=COMPILE,
        meaning="Writes the graphs before and after each pass."),
    Key(path="compile.offload_parameters", kind=Kind.BOOL, default=False, since="0.16.6", source=COMPILE,
        meaning="Keeps parameters in host memory between uses; set by itself where both offload sections are there."),
    Key(path="compile.sync_before_reduce", kind=Kind.BOOL, default=False, since="0.16.6", source=COMPILE,
        meaning="Synchronises before each reduction; for debugging."),
    Key(path="compile.sync_after_reduce", kind=Kind.BOOL, default=False, since="0.16.6", source=COMPILE,
        meaning="Synchronises after each reduction; for debugging."),
    Key(path="compile.sync_before_allgather", kind=Kind.BOOL, default=False, since="0.16.6", source=COMPILE,
        meaning="Synchronises before each gather; for debugging."),
    Key(path="compile.sync_after_allgather", kind=Kind.BOOL, default=False, since="0.16.6", source=COMPILE,
        meaning="Synchronises after each gather; for debugging."),
    Key(path="compile.keep_int_input_tensors", kind=Kind.BOOL, default=True, since="0.17.2", source=COMPILE,
        meaning="Keeps real values of integer inputs for profiling, which index operations need."),
    Key(path="compile.keep_all_input_tensors", kind=Kind.BOOL, default=False, since="0.17.2", source=COMPILE,
        meaning="Keeps real values of all inputs for profiling; more memory."),
    Key(path="compile.passes", kind=Kind.LIST, is_nullable=True, since="0.18.9", source=COMPILE,
        meaning="Passes to run instead of those the stage implies; autotp goes with none of the others."),
    Key(path="compile.passes.*", kind=Kind.TEXT, words=("z1", "z3", "autosp", "autotp"), since="0.18.9", source=COMPILE,
        meaning="One pass."),
    Key(path="hybrid_engine", kind=Kind.OBJECT, source=HYBRID,
        meaning="Switches between training and fast generation, as RLHF needs."),
    Key(path="hybrid_engine.enabled", kind=Kind.BOOL, default=False, source=HYBRID, meaning="Turns it on."),
    Key(path="hybrid_engine.max_out_tokens", kind=Kind.INT, default=512, least=1, source=HYBRID,
        meaning="Tokens of prompt and answer for which the cache is laid out."),
    Key(path="hybrid_engine.inference_tp_size", kind=Kind.INT, default=1, source=HYBRID,
        meaning="GPUs that split the model during generation."),
    Key(path="hybrid_engine.release_inference_cache", kind=Kind.BOOL, default=False, source=HYBRID,
        meaning="Frees the generation cache before training goes on; less memory, slower."),
    Key(path="hybrid_engine.pin_parameters", kind=Kind.BOOL, default=True, source=HYBRID,
        meaning="Keeps gathered parameters through a whole generation (stage 3)."),
    Key(path="hybrid_engine.tp_gather_partition_size", kind=Kind.INT, default=8, source=HYBRID,
        meaning="Layers gathered at a time for generation (stage 3)."),
    Key(path="hybrid_engine.enable_cuda_graph", kind=Kind.BOOL, default=False, since="0.19.6", source=HYBRID,
        meaning="Replays generation as a CUDA graph; not with stage 3."),
)
# fmt: on
