"""Ways to train a model that tape and trace are both asked about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dstrain.choices import Attention, Method


class Rows(StrEnum):
    """What rows of a micro-batch look like."""

    ALONE = "alone"
    PADDED = "padded"
    PACKED = "packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to train, as far as it is not a number."""

    method: Method
    """What is trained."""
    has_dropout: bool
    """Whether adapters drop inputs."""
    attn: Attention
    """Attention implementation."""
    rows: tuple[Rows, ...]
    """What rows may look like: one sample, several of which the shorter are padded, or several samples in each."""
    grad_ckpt: bool
    """Whether activations are recomputed."""

    @property
    def title(self) -> str:
        """Returns it in a few words."""
        method = f"{self.method.value}{' + dropout' if self.has_dropout else ''}"
        rows = f" {self.rows[0].value}" if len(self.rows) == 1 else ""
        return f"{method}, {self.attn.value}{rows}, {'recomputed' if self.grad_ckpt else 'kept'}"


WAYS = tuple(
    Way(method=method, has_dropout=has_dropout, attn=attn, rows=rows, grad_ckpt=grad_ckpt)
    for method, has_dropout in ((Method.FULL, False), (Method.LORA, False), (Method.LORA, True))
    for attn, rows in (
        (Attention.FLASH_ATTENTION_2, (Rows.ALONE, Rows.PADDED, Rows.PACKED)),
        (Attention.SDPA, (Rows.ALONE,)),
        (Attention.SDPA, (Rows.PADDED,)),
        (Attention.SDPA, (Rows.PACKED,)),
        (Attention.EAGER, (Rows.ALONE, Rows.PADDED)),
    )
    for grad_ckpt in (False, True)
)
"""Every combination."""
