"""What a configuration with one mistake is, and how the mistake is proven.

`⟦` marks where the finding must stand; it is not a part of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MARK = "⟦"


@dataclass(frozen=True, kw_only=True)
class Raises:
    """The engine ends the run with an error that has these words."""

    words: str
    """A part of the message."""
    by: str = "ranks"
    """Who raises: `config` (DeepSpeedConfig alone), or two `ranks` that train."""


@dataclass(frozen=True, kw_only=True)
class Becomes:
    """Two ranks train, and the engine is another one than the file says."""

    facts: dict[str, Any]
    """What `ranks.engine_facts` gives."""


@dataclass(frozen=True, kw_only=True)
class Says:
    """What needs CUDA, or hours: the engine's source says it."""

    file: str
    """Below site-packages."""
    text: str
    """What stands there."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One mistake."""

    name: str
    """What it is."""
    rule: str
    """The rule that finds it."""
    text: str
    """The file, with a mark before the place."""
    fix: str
    """A part of what the finding says to write."""
    proof: Raises | Becomes | Says | None = None
    """How the engine shows it; None for what is no error."""
    is_trainers: bool = True
    """Whether the Trainer reads it."""
    is_composite: bool = False
    """Whether the proof's model has its hidden_size in text_config alone, as vision-language models have."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """TrainingArguments of the proof beside micro-batch 1, bf16 and max_grad_norm 0.3."""

    @property
    def source(self) -> str:
        """The text without its mark."""
        return self.text.replace(MARK, "")

    @property
    def place(self) -> tuple[int, int]:
        """Line and column of the mark, from 1."""
        before = self.text[: self.text.index(MARK)]
        return before.count("\n") + 1, len(before) - before.rfind("\n")


AUTO = """{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "bf16": {"enabled": "auto"},
"""
RAW = """{
  "train_micro_batch_size_per_gpu": 1,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
"""
ZERO2 = '  "zero_optimization": {"stage": 2}\n}\n'


def zero(stage: int, *lines: str, head: str = AUTO) -> str:
    """Returns a configuration with these lines in its zero_optimization."""
    inner = ",\n".join(f"    {line}" for line in (f'"stage": {stage}', *lines))
    saving = ""
    if stage == 3 and not any("stage3_gather" in line for line in lines):
        saving = ',\n    "stage3_gather_16bit_weights_on_model_save": true'
    return f'{head}  "zero_optimization": {{\n{inner}{saving}\n  }}\n}}\n'


def top(*lines: str, head: str = AUTO, tail: str = ZERO2) -> str:
    """Returns a configuration with these lines at its top."""
    return head + "".join(f"  {line},\n" for line in lines) + tail


def flat(*lines: str) -> str:
    """Returns a configuration with these lines at its top, of ZeRO-0 in fp32: the optimizer is torch's own."""
    return top(*lines, head=AUTO.replace('  "bf16": {"enabled": "auto"},\n', ""), tail=ZERO2.replace("2", "0"))


CPU_OPTIMIZER = '"offload_optimizer": {"device": "cpu"}'
ADAMW = '"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}'
