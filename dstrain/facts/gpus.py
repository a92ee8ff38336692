"""The table of GPUs: memory as nvidia-smi shows it, dense FLOP/s, memory bandwidth, links; each row with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One model of GPU."""

    name: str
    """Its short name, such as `h100-sxm`."""
    aliases: tuple[str, ...]
    """Other names that `--gpu` takes, and (lower case) fragments of the name that NVML reports."""
    memory_mib: int
    """Total memory in MiB, as nvidia-smi shows it."""
    bf16_flops_per_s: float
    """Dense bf16 tensor-core FLOP/s; 0 where the GPU has no bf16."""
    fp16_flops_per_s: float
    """Dense fp16 tensor-core FLOP/s with fp32 accumulation."""
    hbm_bytes_per_s: float
    """Memory bandwidth."""
    link: str
    """The link between GPUs of one node, a name in `links`."""
    compute_capability: tuple[int, int]
    """CUDA compute capability; (0, 0) for what is not NVIDIA's."""
    has_flash_attention_2: bool
    """Whether FlashAttention-2 runs on it (compute capability 8.0 and up)."""
    source: str
    """Where the figures are from."""

    @property
    def memory_bytes(self) -> int:
        """Total memory in bytes."""
        return self.memory_mib * 2**20

    @property
    def has_bf16(self) -> bool:
        """Whether matrix products run in bf16."""
        return self.bf16_flops_per_s > 0
