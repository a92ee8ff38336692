"""The configurations that `measure` runs, and the DeepSpeed configuration of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.published.training_code import Loss, with_loss
from dstrain.choices import LossKernel, Method, Offload
from dstrain.plan.configuration import DEFAULTS, Configuration, changed

TIMED_STEPS = 3
NUM_QUICK = 4

_QWEN3 = {"model_type": "qwen3", "dtype": "bfloat16", "head_dim": 128, "max_position_embeddings": 40960}
_LARGE = {**_QWEN3, "vocab_size": 151936, "num_key_value_heads": 8}


def _shape(base: Mapping[str, Any], hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**base, **sizes, "num_attention_heads": heads, "tie_word_embeddings": tied}


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.6b": _shape(_LARGE, 1024, 3072, 28, 16, tied=True),
    "1.7b": _shape(_LARGE, 2048, 6144, 28, 16, tied=True),
    "4b": _shape(_LARGE, 2560, 9728, 36, 32, tied=True),
    "8b": _shape(_LARGE, 4096, 12288, 36, 32, tied=False),
    "9m": _shape({**_QWEN3, "vocab_size": 8192, "num_key_value_heads": 2}, 256, 768, 6, 4, tied=False),
    "6m-tied": _shape({**_QWEN3, "vocab_size": 8192, "num_key_value_heads": 2}, 256, 768, 6, 4, tied=True),
}
"""Config.json by name. Source of the large ones: Qwen/Qwen3-0.6B, 1.7B, 4B and 8B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration to measure."""

    shape: str
    """A name in SHAPES."""
    stage: int
    """ZeRO stage."""
    seq_len: int
    """Tokens of a row."""
    micro_batch: int = 1
    """Rows of a micro-batch."""
    grad_accum: int = 1
    """Micro-batches of a step."""
    grad_ckpt: bool = False
    """Whether activations are recomputed."""
    lora: bool = False
    """Whether an adapter trains in place of all parameters."""
    offload: Offload = Offload.NONE
    """States that are offloaded."""
    liger: bool = False
    """Whether Liger's kernels are used, its fused loss among them."""
    changes: Mapping[str, int] = field(default_factory=dict)
    """Further fields of the configuration."""
    note: str = ""
    """Label of the changes."""

    @property
    def name(self) -> str:
        """Returns a short description of the case."""
        parts = [self.shape, "lora" if self.lora else "full", f"z{self.stage}", f"s{self.seq_len}x{self.micro_batch}"]
        parts += [f"ga{self.grad_accum}"] if self.grad_accum > 1 else []
        parts += ["ckpt"] if self.grad_ckpt else []
        parts += [f"offload-{self.offload}"] if self.offload is not Offload.NONE else []
        parts += ["liger"] if self.liger else []
        return " ".join([*parts, self.note]).strip()

    def configuration(self) -> Configuration:
        """Returns the plan's configuration; nothing is padded, as with packing."""
        names = ("seq_len", "micro_batch", "grad_accum", "grad_ckpt", "offload", "liger")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        fields |= {"reduce_bucket_size": 50_000_000, **self.changes}
        return changed(
            DEFAULTS,
            **fields,
            method=Method.LORA if self.lora else Method.FULL,
            loss=LossKernel.FUSED if self.liger else LossKernel.FULL,
            code=with_loss(DEFAULTS.code, Loss.LIGER) if self.liger else DEFAULTS.code,
            zero_stage=self.stage,
            overlap_comm=self.stage == 3,
            packing=True,
        )


NO_REUSE: Mapping[str, int] = {"max_reuse_distance": 0, "prefetch_bucket_size": 10_000_000}
_OPTIMIZER, _PARAMS = Offload.OPTIMIZER, Offload.PARAMS
GPU_CASES = (
    Case(shape="0.6b", stage=2, seq_len=2048),
    Case(shape="0.6b", stage=3, seq_len=2048),
    Case(shape="8b", stage=2, seq_len=2048, grad_ckpt=True, lora=True),
    Case(shape="1.7b", stage=2, seq_len=2048, grad_ckpt=True, offload=_OPTIMIZER),
    Case(shape="4b", stage=2, seq_len=2048, grad_ckpt=True),
    Case(shape="1.7b", stage=1, seq_len=4096, grad_ckpt=True, micro_batch=2, liger=True),
    Case(shape="0.6b", stage=0, seq_len=2048, grad_ckpt=True),
    Case(shape="0.6b", stage=1, seq_len=512, micro_batch=8),
    Case(shape="0.6b", stage=2, seq_len=16384, grad_ckpt=True),
    Case(shape="1.7b", stage=2, seq_len=2048, grad_accum=4),
    Case(shape="1.7b", stage=3, seq_len=4096, grad_ckpt=True),
    Case(shape="1.7b", stage=3, seq_len=4096, grad_ckpt=True, changes=NO_REUSE, note="no-reuse"),
    Case(shape="1.7b", stage=2, seq_len=8192, grad_ckpt=True, liger=True),
    Case(shape="4b", stage=3, seq_len=1024, grad_ckpt=True, changes=NO_REUSE, note="no-reuse"),
    Case(shape="4b", stage=2, seq_len=4096, lora=True),
    Case(shape="4b", stage=2, seq_len=16384, grad_ckpt=True, lora=True),
    Case(shape="8b", stage=3, seq_len=4096, grad_ckpt=True, lora=True),
    Case(shape="8b", stage=2, seq_len=16384, grad_ckpt=True, lora=True, liger=True),
    Case(shape="1.7b", stage=3, seq_len=2048, grad_ckpt=True, offload=_OPTIMIZER),
    Case(shape="1.7b", stage=3, seq_len=2048, grad_ckpt=True, offload=_PARAMS),
    Case(shape="4b", stage=2, seq_len=2048, grad_ckpt=True, offload=_OPTIMIZER),
)
"""Cases for a GPU, the most informative first, since time may run out."""
SMALL: Mapping[str, int] = {"reduce_bucket_size": 500_000, "prefetch_bucket_size": 100_000}
CPU_CASES = (
    Case(shape="9m", stage=2, seq_len=512, micro_batch=2, changes=SMALL),
    Case(shape="9m", stage=3, seq_len=512, micro_batch=2, grad_ckpt=True, changes=SMALL),
    Case(shape="9m", stage=2, seq_len=512, micro_batch=2, lora=True, changes=SMALL),
    Case(shape="6m-tied", stage=1, seq_len=1024, grad_ckpt=True, changes=SMALL),
    Case(shape="9m", stage=0, seq_len=512, micro_batch=2, changes=SMALL),
    Case(shape="9m", stage=1, seq_len=512, grad_accum=2, changes=SMALL),
    Case(shape="9m", stage=2, seq_len=512, grad_accum=2, grad_ckpt=True, changes=SMALL),
    Case(shape="9m", stage=3, seq_len=1024, changes={**SMALL, "max_reuse_distance": 0}, note="no-reuse"),
    Case(shape="9m", stage=3, seq_len=512, micro_batch=2, grad_ckpt=True, lora=True, changes=SMALL),
)
"""Cases for a CPU; without offloading, since its device is the host."""


def ds_config(configuration: Configuration) -> dict[str, Any]:
    """Returns the DeepSpeed configuration of a configuration."""
    zero: dict[str, Any] = {
        "stage": configuration.zero.stage,
        "overlap_comm": configuration.zero.overlap_comm,
        "contiguous_gradients": True,
        "reduce_bucket_size": configuration.zero.reduce_bucket_size,
    }
    if configuration.zero.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": configuration.zero.prefetch_bucket_size,
            "stage3_param_persistence_threshold": configuration.zero.param_persistence_threshold,
            "stage3_max_live_parameters": configuration.zero.max_live_parameters,
            "stage3_max_reuse_distance": configuration.zero.max_reuse_distance,
            "sub_group_size": configuration.zero.sub_group_size,
        }
    place = {"device": "cpu", "pin_memory": configuration.zero.pin_memory}
    if configuration.zero.offload is not Offload.NONE:
        zero["offload_optimizer"] = place
    if configuration.zero.offload is Offload.PARAMS:
        zero["offload_param"] = place
    return {
        "train_micro_batch_size_per_gpu": configuration.batch.micro_batch,
        "gradient_accumulation_steps": configuration.step.grad_accum,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
