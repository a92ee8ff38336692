"""Settings that CPU ranks do not run: one table for the planner, lint, `dstrain run` and the pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dstrain.choices import Attention

_ZERO = "zero_optimization."
QWZ = _ZERO + "zero_quantized_weights"
"""Key of parameters that are gathered in 8 bits."""
OFFLOADED = "the optimizer is offloaded"
"""Setting of a configuration that lifts an optimizer's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimit:
    """A value of an option or job key that a CPU does not run, always or mostly."""

    key: str
    """Name in requests, configurations and, if the job has it, in job.yaml; dotted for a key of ds_config.json."""
    value: str
    """The value; `true` for a switch."""
    why: str
    """The feature that a CPU lacks."""
    instead: str
    """The value to write."""
    unless: str = ""
    """Condition under which it runs all the same; empty: none."""
    source: str
    """Where the limit is implemented."""

    @property
    def problem(self) -> str:
        """The problem with the value."""
        return f"{self.key} is {self.value}, but the ranks train on the CPU"

    @property
    def asked(self) -> str:
        """The option of `dstrain plan` that asks for the value."""
        return self._option(self.value)

    @property
    def answer(self) -> str:
        """The option to write."""
        return self._option(self.instead)

    def _option(self, value: str) -> str:
        name = "qwz" if self.key == QWZ else self.key.replace("_", "-")
        return {"true": f"--{name}", "false": f"--no-{name}"}.get(value, f"--{name} {value}")

    @property
    def is_of_engine(self) -> bool:
        """Whether the key is one of ds_config.json."""
        return "." in self.key


_DS = "deepspeed 0.19.8 "

# fmt: off
CPU_LIMITS = (
    *(CpuLimit(key="attn", value=attn, why="FlashAttention has no kernels for a CPU", instead="sdpa",
               source="flash-attn, which is built with nvcc or hipcc") for attn in Attention if attn.is_flash),
    CpuLimit(key="precision", value="fp16", why="most CPUs multiply no fp16 matrices", instead="fp32",
             unless="the CPU has AVX512-FP16 or AMX-FP16",
             source=_DS + "accelerator/cpu_accelerator.py: is_fp16_supported"),
    CpuLimit(key="offload", value="nvme", why="DeepSpeed builds async_io with the headers of libaio only",
             instead="params", unless="libaio-dev is installed",
             source=_DS + "ops/op_builder/async_io.py: is_compatible"),
    CpuLimit(key="activation_offload", value="true", why="activations of a CPU are in host RAM already",
             instead="false", source="torch 2.13 autograd/graph.py: save_on_cpu pins memory, which a CPU alone cannot"),
    CpuLimit(key="liger", value="true", why="Triton compiles kernels for GPUs only", instead="false",
             source="triton 3.9 runtime/driver.py; its interpreter alone does not run liger-kernel 0.8.5's norms"),
    *(CpuLimit(key=f"{_ZERO}zero_quantized_{name}", value="true", why="DeepSpeed's quantizer is a CUDA kernel",
               instead="false", unless=unless, source=_DS + "ops/op_builder/cpu/no_impl.py: NotImplementedBuilder")
      for name, unless in (("weights", ""), ("nontrainable_weights", ""),
                           ("gradients", "there is one node, on which it does nothing"))),
    CpuLimit(key="optimizer.type", value="Lamb", why="DeepSpeed's Lamb is a CUDA kernel", instead="AdamW",
             source=_DS + "ops/lamb/fused_lamb.py: FusedLamb"),
    CpuLimit(key="optimizer.type", value="Lion", why="DeepSpeed's Lion is a CUDA kernel", instead="AdamW",
             unless=OFFLOADED,
             source=_DS + "runtime/engine.py: _configure_basic_optimizer (FusedLion, DeepSpeedCPULion)"),
)
# fmt: on
"""Everything else that dstrain plans trains on a CPU too, in 4 bits with bitsandbytes 0.49 or later."""


def limits_of(values: Mapping[str, Any]) -> list[CpuLimit]:
    """Returns the limits that values of keys meet; DeepSpeed takes names of optimizers in any case.

    >>> [limit.instead for limit in limits_of({"attn": "flash_attention_2", "precision": "bf16"})]
    ['sdpa']
    """
    return [limit for limit in CPU_LIMITS if str(values.get(limit.key)).lower() == limit.value.lower()]
