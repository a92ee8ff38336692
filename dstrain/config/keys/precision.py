"""Number formats: `bf16`, `fp16`, `torch_autocast`, `data_types`, and `weight_quantization`."""

from __future__ import annotations

from dstrain.config.keys.key import Key, Kind, Names

BF16 = "runtime/precision_config.py: DeepSpeedBF16Config"
FP16 = "runtime/precision_config.py: DeepSpeedFP16Config"
AUTOCAST = "runtime/config.py: get_torch_autocast_enabled"
TYPES = "runtime/config.py: get_data_types_params"
QUANT = "inference/config.py: WeightQuantConfig"
QUANTIZER = "inference/quantization/utils.py: Quantizer"

# fmt: off
PRECISION: tuple[Key, ...] = (
    Key(path="bf16", kind=Kind.OBJECT, is_nullable=True, source=BF16,
        meaning="Trains in bfloat16 with fp32 master weights; needs Ampere or newer. Not together with fp16."),
    Key(path="bf16.enabled", kind=Kind.BOOL, default=False, filled="bf16 or bf16_full_eval", source=BF16,
        meaning="Turns it on."),
    Key(path="bf16.immediate_grad_update", kind=Kind.BOOL, default=False,
        default_note="false; true from 0.16.5 to 0.17.0", source=BF16,
        meaning="Stage 1 with fp32 accumulation: adds each gradient to the fp32 sum in its hook, not after backward."),
    Key(path="bf16.check_grad_overflow", kind=Kind.BOOL, default=True, default_note="true since 0.19.3; false before",
        since="0.17.1", source=BF16, meaning="Skips the step when a gradient is infinite or NaN."),
    Key(path="bf16.bf16_master_weights_and_grads", kind=Kind.BOOL, default=False, since="0.18.3", source=BF16,
        meaning="Master weights and gradients in bf16 too: less memory, less exact. Needs stage 1 to 3."),
    Key(path="bf16.bf16_optimizer_states", kind=Kind.BOOL, default=False, since="0.18.3", source=BF16,
        meaning="Optimizer states in bf16 too; needs bf16_master_weights_and_grads."),
    Key(path="bfloat16", kind=Kind.OBJECT, alias_of="bf16", source=BF16,
        meaning="Old name of bf16; read only where bf16 is missing."),
    Key(path="fp16", kind=Kind.OBJECT, source=FP16,
        meaning="Trains in float16 with loss scaling and fp32 master weights. Not together with bf16."),
    Key(path="fp16.enabled", kind=Kind.BOOL, default=False, filled="fp16 or fp16_full_eval", source=FP16,
        meaning="Turns it on."),
    Key(path="fp16.auto_cast", kind=Kind.BOOL, default=False, source=FP16,
        meaning="Casts the floating-point inputs of the model to float16."),
    Key(path="fp16.loss_scale", kind=Kind.NUMBER, default=0, least=0, source=FP16,
        meaning="Fixed factor on the loss; 0 adapts it to overflows."),
    Key(path="fp16.initial_scale_power", kind=Kind.INT, default=16, source=FP16,
        meaning="The adapting scale starts at 2 to this power."),
    Key(path="fp16.loss_scale_window", kind=Kind.INT, default=1000, least=1, source=FP16,
        meaning="Steps without overflow after which the adapting scale doubles."),
    Key(path="fp16.hysteresis", kind=Kind.INT, default=2, source=FP16,
        meaning="Overflows before the adapting scale is halved."),
    Key(path="fp16.consecutive_hysteresis", kind=Kind.BOOL, default=False, source=FP16,
        meaning="Counts anew after every step without overflow, so only overflows in a row lower the scale."),
    Key(path="fp16.min_loss_scale", kind=Kind.INT, default=1, least=1, source=FP16,
        meaning="The adapting scale never falls below this."),
    Key(path="fp16.fp16_master_weights_and_grads", kind=Kind.BOOL, default=False, source=FP16,
        meaning="Master weights and gradients in fp16; needs an optimizer on the CPU and stage 1 to 3."),
    Key(path="torch_autocast", kind=Kind.OBJECT, names=Names.IGNORED, since="0.17.2", source=AUTOCAST,
        meaning="Runs the model under torch.autocast: weights stay fp32, chosen operations run in 16 bits."),
    Key(path="torch_autocast.enabled", kind=Kind.BOOL, default=False, since="0.17.2", source=AUTOCAST,
        meaning="Turns it on."),
    Key(path="torch_autocast.dtype", kind=Kind.TEXT, default_note="torch's own choice for the device",
        words=(
            "fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "float", "half", "torch.float32", "torch.float16",
            "torch.bfloat16"
        ), since="0.17.2", source=AUTOCAST, meaning="Format of the lowered operations."),
    Key(path="torch_autocast.lower_precision_safe_modules", kind=Kind.LIST,
        default_note="torch.nn.Linear, Conv1d, Conv2d and Conv3d", since="0.17.2", source=AUTOCAST,
        meaning="Full class names of modules whose gradients and parameters may be sent in that format."),
    Key(path="data_types", kind=Kind.OBJECT, names=Names.IGNORED, source=TYPES,
        meaning="Number formats beside those of bf16 and fp16."),
    Key(path="data_types.grad_accum_dtype", kind=Kind.TEXT, default_note="the model's format",
        words=(
            "fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "float", "half", "torch.float32", "torch.float16",
            "torch.bfloat16"
        ), is_nullable=True, source=TYPES, meaning="Format in which gradients are summed over micro batches."),
    Key(path="data_types.param_dtype", kind=Kind.TEXT, default_note="that of bf16 or fp16",
        words=(
            "fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "float", "half", "torch.float32", "torch.float16",
            "torch.bfloat16"
        ), is_nullable=True, since="0.19.2", source=TYPES,
        meaning="Format of the parameters; must agree with bf16 or fp16."),
    Key(path="data_types.buffer_dtype", kind=Kind.TEXT, default_note="as loaded",
        words=(
            "fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "float", "half", "torch.float32", "torch.float16",
            "torch.bfloat16"
        ), is_nullable=True, since="0.19.2", source=TYPES,
        meaning="Format to which buffers (such as rotary tables) are cast; a lower one costs accuracy."),
    Key(path="data_types.keep_in_fp32_modules", kind=Kind.LIST, default="auto", words=("auto",), since="0.19.8",
        source=TYPES,
        meaning="Name patterns of buffers kept in fp32; auto takes the Transformers model's own list, [] keeps none."),
    Key(path="weight_quantization", kind=Kind.OBJECT, source=QUANT,
        meaning="Weights stored in 4 or 8 bits, for inference with stage 3."),
    Key(path="weight_quantization.enabled", kind=Kind.BOOL, default=True, source=QUANT,
        meaning="Accepted, but without effect: a non-empty child turns quantization on."),
    Key(path="weight_quantization.num_bits", kind=Kind.INT, default=8, source=QUANT,
        meaning="Accepted, but without effect; written in the children."),
    Key(path="weight_quantization.q_type", kind=Kind.TEXT, default="symmetric", words=("asymmetric", "symmetric"),
        source=QUANT, meaning="Accepted, but without effect."),
    Key(path="weight_quantization.q_groups", kind=Kind.INT, default=1, source=QUANT,
        meaning="Accepted, but without effect."),
    Key(path="weight_quantization.quantized_initialization", kind=Kind.OBJECT, names=Names.IGNORED, source=QUANT,
        meaning="Quantizes weights while zero.Init makes the model."),
    Key(path="weight_quantization.post_init_quant", kind=Kind.OBJECT, names=Names.FREE, source=QUANT,
        meaning="Quantizes layers of a finished model; its names are parts of module names."),
    Key(path="weight_quantization.post_init_quant.*", kind=Kind.OBJECT, names=Names.IGNORED, source=QUANTIZER,
        meaning="Settings for the layers whose name holds this text."),
    Key(path="weight_quantization.quantized_initialization.num_bits", kind=Kind.INT, least=4, most=8, source=QUANTIZER,
        meaning="Bits of a weight: 4 or 8."),
    Key(path="weight_quantization.quantized_initialization.group_size", kind=Kind.INT, least=1, source=QUANTIZER,
        meaning="Elements that share one scale; must divide the dimension."),
    Key(path="weight_quantization.quantized_initialization.group_dim", kind=Kind.INT, source=QUANTIZER,
        meaning="Dimension that is cut into groups."),
    Key(path="weight_quantization.quantized_initialization.symmetric", kind=Kind.BOOL, source=QUANTIZER,
        meaning="Must be false: only asymmetric quantization is made."),
    Key(path="weight_quantization.post_init_quant.*.num_bits", kind=Kind.INT, least=4, most=8, source=QUANTIZER,
        meaning="Bits of a weight: 4 or 8."),
    Key(path="weight_quantization.post_init_quant.*.group_size", kind=Kind.INT, least=1, source=QUANTIZER,
        meaning="Elements that share one scale; must divide the dimension."),
    Key(path="weight_quantization.post_init_quant.*.group_dim", kind=Kind.INT, source=QUANTIZER,
        meaning="Dimension that is cut into groups."),
    Key(path="weight_quantization.post_init_quant.*.symmetric", kind=Kind.BOOL, source=QUANTIZER,
        meaning="Must be false: only asymmetric quantization is made."),
)
# fmt: on
