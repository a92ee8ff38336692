"""Loads the model of a job through Transformers and PEFT, and replaces its kernels, MLPs and loss as the job asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoConfig
from transformers.core_model_loading import Transpose
from transformers.integrations.deepspeed import deepspeed_config
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import set_tqdm_hook

from dstrain.choices import CompileBackend, LossKernel, Method, Task
from dstrain.errors import InvalidConfig, not_installed
from dstrain.facts.ds_config import zero_stage
from dstrain.facts.model.families import LIGER
from dstrain.facts.model.traits import ALIGNER, VISION, has_tower
from dstrain.job.schema import Job
from dstrain.train import adapters
from dstrain.train.arguments import is_deepcompile
from dstrain.train.checkpoints.saved_model import DTYPES, family_of, shape_of
from dstrain.train.data.collate import without_adapter
from dstrain.train.loss import replace_loss
from dstrain.train.tokenizer import cannot_load
from dstrain.train.tracing.anatomy import dissect

_OWN_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""The loss stays the job's, which the plan counts: Liger's replaces the forward method of the model, on which
`loss: fused` rests, or the cross entropy of the whole process."""


def replace_kernels(model: Any) -> None:
    """Makes a model, with or without adapter, compute on Liger's kernels what the planner counts (`LIGER`).

    Transformers' Trainer has a switch that does the same when training starts, over MLPs that are tiled by then, and
    with an argument of its own for evaluations (Transformers 5.23 trainer.py: use_liger_kernel, skip_logits).
    Raises InvalidConfig for a model that the installed Liger, or the planner, does not know.
    """
    base = without_adapter(model)
    family, owner = base.config.model_type, type(base).__module__
    if not owner.startswith("transformers.") or family not in LIGER:
        raise _refused(f"has no kernels that are planned for {family} of {owner}")
    from liger_kernel.transformers.monkey_patch import (  # type: ignore[import-not-found]  # an extra
        MODEL_TYPE_TO_APPLY_LIGER_FN,
    )
    from transformers.integrations.liger import apply_liger_kernel

    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise _refused(f"as it is installed has no kernels for {family}")
    try:
        apply_liger_kernel(model, _OWN_LOSS)  # type: ignore[no-untyped-call]
    except (AttributeError, ImportError, NotImplementedError, TypeError) as error:
        raise _refused(f"cannot replace the parts of {type(base).__name__}: {error}") from error


def _refused(why: str) -> InvalidConfig:
    return InvalidConfig(f"liger is true, but Liger {why}", hint="liger: false")


def compile_layers(model: Any, *, zero_stage: int, backend: str = CompileBackend.INDUCTOR) -> None:
    """Compiles the forward pass of every decoder layer when it is called first; all layers share the result.

    A layer gets a class of the same name whose `forward` is compiled. Transformers checkpoints around it, and hooks of
    ZeRO-3, which cannot be compiled, run before and after it: a layer is a leaf module, whose weights are gathered
    together. DeepSpeed reduces the gradients of a leaf once its input has one, so the first layer's input
    needs one too. Raises InvalidConfig for layers that are not written for Transformers' checkpoints.
    Source: transformers 5.23 modeling_layers.py: GradientCheckpointingLayer.__init_subclass__; deepspeed 0.19.8
    runtime/zero/parameter_offload.py: _register_deepspeed_module, stage3.py: reduce_leaf_module_grads.
    """
    from deepspeed.utils import set_z3_leaf_module  # type: ignore[import-untyped]

    anatomy = dissect(model)
    layers = anatomy.layers
    if not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        problem = f"layers of {type(without_adapter(model)).__name__} have no forward pass of their own to compile"
        raise InvalidConfig(f"torch_compile is true, but {problem}", hint="torch_compile: false")
    kinds = {kind: _compiled(kind, backend) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
        if zero_stage == 3:
            set_z3_leaf_module(layer, True)
    anatomy.embedding.register_forward_hook(_with_gradient)


def _compiled(kind: Any, backend: str) -> type:
    """Returns a class of layers like another one, compiled once for all lengths; its base wraps checkpoints around."""
    forward = torch.compile(kind.forward.__wrapped__, backend=str(backend), dynamic=True)
    return type(kind.__name__, (kind,), {"forward": forward})


def _with_gradient(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Returns hidden states that have a gradient, in a pass that has any."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


def tile_mlps(model: Any) -> None:
    """Makes the MLP of every decoder layer compute as many tokens at a time as the hidden states are wide.

    Raises InvalidConfig for a model whose layers have no dense MLP. ZeRO-3 gathers an MLP's weights once for all its
    tiles. Source: deepspeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py: TiledMLP, which names that size.
    """
    from deepspeed.utils import set_z3_leaf_module

    for mlp in _mlps(model):
        mlp.forward = partial(_tiled, mlp, mlp.forward)
        set_z3_leaf_module(mlp, True)


def _mlps(model: Any) -> Iterator[Any]:
    layers = getattr(without_adapter(model).get_decoder(), "layers", ())
    found = [getattr(layer, "mlp", None) for layer in layers]
    if not found or any(not hasattr(mlp, "down_proj") for mlp in found):
        problem = f"tiled_mlp is set, but layers of {type(without_adapter(model)).__name__} have no dense MLP"
        raise InvalidConfig(problem, hint="tiled_mlp: false")
    yield from found


def _tiled(mlp: Any, compute: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """Returns the output of an MLP for hidden states, both (batch, seq, hidden)."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP  # type: ignore[import-untyped]

    if torch.is_grad_enabled() and not hidden.requires_grad:
        return compute(hidden)  # as before the first adapter: TiledMLP knows gradients of its input only
    device = hidden.device.type
    as_now: Callable[[], AbstractContextManager[object]] = nullcontext
    if device != "meta" and torch.is_autocast_enabled(device):
        as_now = partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device))

    def of_tile(_: Any, tile: torch.Tensor) -> torch.Tensor:
        with as_now():  # in the backward pass too
            return compute(tile)

    width = hidden.shape[-1]
    trained = [weight for weight in mlp.parameters() if weight.requires_grad]
    result: torch.Tensor = TiledMLP.apply(of_tile, mlp, hidden, math.ceil(hidden.numel() / width**2), trained)
    return result


_NOT_QUANTIZED = (*(rf"(.*\.)?{name}" for name in sorted(VISION | ALIGNER)), "lm_head")
"""Patterns of the modules of a vision-language model that QLoRA leaves as they are. Source: transformers 5.23
quantizers/quantizers_utils.py: should_convert_module; a list replaces the head, which is left out by default."""


def load_model(
    job: Job,
    source: str,
    ds_config: Mapping[str, Any],
    *,
    num_tokens: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Any:
    """Returns the model in the job's dtype, ready for training; with an adapter for `lora` and `qlora`.

    Under ZeRO-3 the TrainingArguments and DeepSpeed's process group must exist already: Transformers then partitions
    every weight as it loads; otherwise each rank would hold the whole model. `num_tokens`: of the tokenizer,
    with the new ones of the job. `report` is called with the number of loaded tensors and of all tensors, except under
    ZeRO-3.
    """
    options: dict[str, Any] = {
        "dtype": DTYPES[job.precision],
        "attn_implementation": str(job.attn),
        "trust_remote_code": job.trust_remote_code,
    }
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=job.trust_remote_code)
        if job.method is Method.QLORA:
            options["quantization_config"] = _quantization(job, config)
        adapters.stretch(config, job.rope_scaling)
        _unpack_mxfp4(config)
        with _counting(report), _shapes_before_partitioning(), _whole_while_loading():
            _require_logits(config, job)
            model = family_of(config).from_pretrained(source, config=config, **options)
    except (OSError, ValueError, ImportError) as error:
        raise cannot_load("model", job, error) from error
    _prepare(model, job, num_tokens)
    if job.method is not Method.FULL:
        dtype = DTYPES[job.precision] if zero_stage(ds_config) < 3 else None  # ZeRO-3 has partitioned the matrices
        model = adapters.of_job(model, job, dtype=dtype)
    _replace_parts(model, job, ds_config)
    return model


def _require_logits(config: Any, job: Job) -> None:
    """Raises InvalidConfig for a reward model, whose head would be drawn anew."""
    if any(name.endswith("ForSequenceClassification") for name in getattr(config, "architectures", None) or ()):
        problem = f"model: {job.model} is a reward model, without logits of the vocabulary"
        raise InvalidConfig(problem, hint="Train a reward model with TRL's RewardTrainer.")


def _replace_parts(model: Any, job: Job, ds_config: Mapping[str, Any]) -> None:
    """Makes a model compute as the job says; tiles are of the MLPs that Liger has replaced."""
    if job.liger:
        replace_kernels(model)
    if job.loss is not LossKernel.FULL and job.task is not Task.DPO:
        replace_loss(model, job.loss)
    if job.tiled_mlp:
        tile_mlps(model)
    if job.torch_compile and not is_deepcompile(ds_config):
        compile_layers(model, zero_stage=zero_stage(ds_config), backend=job.torch_compile_backend)


def _prepare(model: Any, job: Job, num_tokens: int) -> None:
    """Makes a loaded model ready to train, with rows for new tokens: drawn from the distribution of the others."""
    _forget_unused_conversions(model)
    _keep_4_bit_layout(model)
    if job.new_tokens and num_tokens > model.config.get_text_config().vocab_size:
        with torch.random.fork_rng(devices=()):  # so that an adapter is drawn alike under every ZeRO stage
            model.resize_token_embeddings(num_tokens)
    model.config.use_cache = False
    adapters.freeze(model, job)


@contextmanager
def _counting(report: Callable[[int, int], None]) -> Iterator[None]:
    """Calls `report` with the progress of Transformers' progress bars, shown or not."""

    def hook(factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        bar = factory(*arguments, **options)
        return _counted(bar, len(arguments[0])) if arguments and isinstance(arguments[0], Sized) else bar

    def _counted(items: Iterable[Any], total: int) -> Iterator[Any]:
        for done, item in enumerate(items):
            report(done, total)
            yield item

    previous = set_tqdm_hook(hook)
    try:
        yield
    finally:
        set_tqdm_hook(previous)


class _Shapes:
    """A model as Transformers' conversion of weights asks for it: by the shapes of its parameters."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(shape_of(self._model.get_parameter(name)), device="meta")


@contextmanager
def _shapes_before_partitioning() -> Iterator[None]:
    """Lets Transformers load experts that are stored as they are used, under ZeRO-3 too.

    It transposes them unless they have the parameter's shape already, which ZeRO-3 has made (0,).
    Source: Transformers 5.23 core_model_loading.py: Transpose.convert (check_dims), Qwen3-VL's experts.
    """
    convert = Transpose.convert

    def convert_with_shapes(self: Any, *arguments: Any, **context: Any) -> Any:
        return convert(self, *arguments, **context | {"model": _Shapes(context.get("model"))})

    Transpose.convert = convert_with_shapes  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Transpose.convert = convert  # type: ignore[method-assign]


@contextmanager
def _whole_while_loading() -> Iterator[None]:
    """Lets Transformers load a model under ZeRO-3, which the engine splits over tensor-parallel ranks later.

    Transformers refuses to convert weights for such ranks, also where a checkpoint has none to convert. Source:
    Transformers 5.23 integrations/deepspeed.py: _apply_weight_conversions_to_state_dict.
    """
    config: Any = deepspeed_config()  # type: ignore[no-untyped-call]
    section = config.pop("tensor_parallel", None) if config else None
    try:
        yield
    finally:
        if section is not None:
            config["tensor_parallel"] = section


def _unpack_mxfp4(config: Any) -> None:
    """Lets Transformers load experts in MXFP4, as gpt-oss has them, in the dtype of the job: only so can they train."""
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        quantization["dequantize"] = True


def _forget_unused_conversions(model: Any) -> None:
    """Makes a save undo only those conversions of weights that loading has done, and not that from MXFP4.

    Transformers 5.23 sees to that without ZeRO-3. With it, Qwen3-VL's weights would be saved under names that no other
    program knows; unpacked experts would have the names of packed ones. Source: core_model_loading.py:
    convert_and_load_state_dict_in_model; integrations/deepspeed.py: _load_state_dict_into_zero3_model;
    integrations/mxfp4.py: Mxfp4Dequantize.reverse_op.
    """
    if (conversions := getattr(model, "_weight_conversions", None)) is not None:
        model._weight_conversions = [
            conversion
            for conversion in conversions
            if conversion.was_used() and not any(isinstance(step, Mxfp4Dequantize) for step in _steps(conversion))
        ]


def _steps(conversion: Any) -> list[Any]:
    return list(getattr(conversion, "operations", None) or ())


def _keep_4_bit_layout(model: Any) -> None:
    """Keeps evaluations on a CPU with AVX512-BF16 from packing 4-bit weights for its inference kernel.

    That kernel has no gradient, and the packed weights stay: training after an evaluation would pass no gradient
    through them, and under ZeRO-3 could not save them. Source: bitsandbytes 0.50 nn/modules.py: Linear4bit.forward;
    autograd/_functions.py: matmul_4bit.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _quantization(job: Job, config: Any) -> Any:
    """Returns the 4-bit settings; ZeRO-3 needs the compute dtype as storage dtype.

    A tower and its aligner stay in the job's dtype, as the plan has them; Transformers would quantize them too.
    """
    if find_spec("bitsandbytes") is None:
        raise not_installed("method: qlora needs", "bitsandbytes", install="pip install 'dstrain[qlora]'")
    from transformers import BitsAndBytesConfig

    dtype = DTYPES[job.precision]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
        llm_int8_skip_modules=list(_NOT_QUANTIZED) if has_tower(config) else None,  # None: the head alone
    )
