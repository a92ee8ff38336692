"""Number formats: `bf16`, `fp16`, `torch_autocast`, `data_types`, and `weight_quantization`."""

from __future__ import annotations

from dstrain.config.keys.key import (
    BOOL,
    INT,
    LIST,
    NUMBER,
    OBJECT,
    TEXT,
    Key,
    Names,
    flag,
    row,
    section,
    switch,
    within,
)

BF16 = "runtime/precision_config.py: DeepSpeedBF16Config"
FP16 = "runtime/precision_config.py: DeepSpeedFP16Config"
AUTOCAST = "runtime/config.py: get_torch_autocast_enabled"
TYPES = "runtime/config.py: get_data_types_params"
QUANT = "inference/config.py: WeightQuantConfig"
QUANTIZER = "inference/quantization/utils.py: Quantizer"
_DTYPES = (
    *("fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "float", "half"),
    *("torch.float32", "torch.float16", "torch.bfloat16"),
)

# fmt: off
PRECISION: tuple[Key, ...] = (
    *section("bf16", BF16,
        "Trains in bfloat16 with fp32 master weights; needs Ampere or newer. Incompatible with fp16.",
        is_nullable=True)(
        switch(filled="bf16 or bf16_full_eval"),
        flag("immediate_grad_update",
            "Stage 1 with fp32 accumulation: adds each gradient to the fp32 sum in its hook instead of after backward.",
            default_note="false; true from 0.16.5 to 0.17.0"),
        row("check_grad_overflow", BOOL, "Skips the step if a gradient is infinite or NaN.", default=True,
            default_note="true since 0.19.3; false before", since="0.17.1"),
        flag("bf16_master_weights_and_grads",
            "Keeps master weights and gradients in bf16: less memory, less precision. Needs stage 1 to 3.",
            since="0.18.3"),
        flag("bf16_optimizer_states", "Keeps optimizer states in bf16; needs bf16_master_weights_and_grads.",
            since="0.18.3"),
    ),
    *within("", BF16)(
        row("bfloat16", OBJECT, "Old name of bf16; read only if bf16 is missing.", alias_of="bf16"),
    ),
    *section("fp16", FP16, "Trains in float16 with loss scaling and fp32 master weights. Incompatible with bf16.")(
        switch(filled="fp16 or fp16_full_eval"),
        flag("auto_cast", "Casts the model's floating-point inputs to float16."),
        row("loss_scale", NUMBER, "Fixed loss scale; 0 means a dynamic scale that adapts to overflows.", default=0,
            least=0),
        row("initial_scale_power", INT, "The dynamic scale starts at 2 to this power.", default=16),
        row("loss_scale_window", INT, "Steps without overflow before the dynamic scale doubles.", default=1000,
            least=1),
        row("hysteresis", INT, "Overflows before the dynamic scale is halved.", default=2),
        flag("consecutive_hysteresis",
            "Resets the count after every step without overflow, so that only consecutive overflows lower the scale."),
        row("min_loss_scale", INT, "Lower bound of the dynamic scale.", default=1, least=1),
        flag("fp16_master_weights_and_grads",
            "Keeps master weights and gradients in fp16; needs an optimizer on the CPU and stage 1 to 3."),
    ),
    *section("torch_autocast", AUTOCAST,
        "Runs the model under torch.autocast: weights stay in fp32, selected operations run in 16 bits.",
        names=Names.IGNORED, since="0.17.2")(
        switch(),
        row("dtype", TEXT, "Data type of the lowered operations.", default_note="torch's own choice for the device",
            words=_DTYPES),
        row("lower_precision_safe_modules", LIST,
            "Full class names of modules whose gradients and parameters may be communicated in that type.",
            default_note="torch.nn.Linear, Conv1d, Conv2d and Conv3d"),
    ),
    *section("data_types", TYPES, "Data types in addition to those of bf16 and fp16.", names=Names.IGNORED)(
        row("grad_accum_dtype", TEXT, "Data type in which gradients are summed over micro-batches.",
            default_note="the model's format", words=_DTYPES, is_nullable=True),
        row("param_dtype", TEXT, "Data type of the parameters; must agree with bf16 or fp16.",
            default_note="that of bf16 or fp16", words=_DTYPES, is_nullable=True, since="0.19.2"),
        row("buffer_dtype", TEXT,
            "Data type to which buffers (such as rotary tables) are cast; a lower one costs accuracy.",
            default_note="as loaded", words=_DTYPES, is_nullable=True, since="0.19.2"),
        row("keep_in_fp32_modules", LIST,
            "Name patterns of buffers kept in fp32; auto uses the Transformers model's own list, [] keeps none.",
            default="auto", words=("auto",), since="0.19.8"),
    ),
    *section("weight_quantization", QUANT, "Stores weights in 4 or 8 bits, for inference with stage 3.")(
        row("enabled", BOOL, "Accepted, but without effect: a non-empty subsection enables quantization.",
            default=True),
        row("num_bits", INT, "Accepted, but without effect; set it in the subsections.", default=8),
        row("q_type", TEXT, "Accepted, but without effect.", default="symmetric", words=("asymmetric", "symmetric")),
        row("q_groups", INT, "Accepted, but without effect.", default=1),
    ),
    *section("weight_quantization.quantized_initialization", QUANT,
        "Quantizes weights while zero.Init builds the model.", names=Names.IGNORED)(),
    *section("weight_quantization.post_init_quant", QUANT,
        "Quantizes layers of a built model; its keys are parts of module names.", names=Names.FREE)(),
    *section("weight_quantization.post_init_quant.*", QUANTIZER,
        "Settings for the layers whose name contains this text.", names=Names.IGNORED)(),
    *within("weight_quantization.quantized_initialization", QUANTIZER)(
        row("num_bits", INT, "Bits of a weight: 4 or 8.", least=4, most=8),
        row("group_size", INT, "Elements that share one scale; must divide the dimension.", least=1),
        row("group_dim", INT, "Dimension that is divided into groups."),
        row("symmetric", BOOL, "Must be false: only asymmetric quantization is implemented."),
    ),
    *within("weight_quantization.post_init_quant.*", QUANTIZER)(
        row("num_bits", INT, "Bits of a weight: 4 or 8.", least=4, most=8),
        row("group_size", INT, "Elements that share one scale; must divide the dimension.", least=1),
        row("group_dim", INT, "Dimension that is divided into groups."),
        row("symmetric", BOOL, "Must be false: only asymmetric quantization is implemented."),
    ),
)
# fmt: on
