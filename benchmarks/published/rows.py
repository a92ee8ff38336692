"""Rows of a table of published runs as typed records: the columns, and what their notes say."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dstrain.units import GIB, MIB


class Basis(StrEnum):
    """Kind of memory that a published peak counts."""

    ALLOCATED = "allocated"
    ACTIVE = "active"
    RESERVED = "reserved"
    NVIDIA_SMI = "nvidia-smi"
    UNKNOWN = "unknown"


class Outcome(StrEnum):
    """How a run ended."""

    FITS = "fits"
    OUT_OF_MEMORY = "out of memory"
    UNKNOWN = "unknown"


class Publisher(StrEnum):
    """Who measured; each has its own training code and its own words in the notes."""

    FMS = "foundation-model-stack/fms-acceleration"
    H2O = "h2oai/h2o-llmstudio"
    INTERNEVO = "InternLM/InternEvo"
    LITGPT = "Lightning-AI/litgpt"
    LLM_FOUNDRY = "mosaicml/llm-foundry"
    MEGATRON_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge"
    NANOTRON = "nanotron"
    SWIFT = "modelscope/ms-swift"
    TORCHTITAN = "pytorch/torchtitan"
    TORCHTUNE = "pytorch/torchtune"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run. Text columns are as published; a missing number is None."""

    id: str
    """Its id in the table."""
    source: str
    """Repository, page and table that it is from."""
    publisher: Publisher
    """Who measured."""
    model: str
    """The model, as the source calls it."""
    params: float | None
    """Parameters, often rounded."""
    method: str
    """The training method."""
    zero_stage: int | None
    """Stage of ZeRO, or the one that FSDP or another optimizer stands for; None: nothing is sharded."""
    sharding: str
    """The column as published, such as `3 (FSDP)`."""
    offload: str
    """States that are offloaded."""
    num_gpus: int
    """GPUs of the run."""
    gpu: str
    """The GPU, as the source calls it."""
    seq_len: int | None
    """Tokens of a sample; an upper bound where `lengths_vary`."""
    micro_batch: int | None
    """Samples of one forward of one GPU."""
    grad_accum: int | None
    """Micro-batches of one step."""
    grad_ckpt: str
    """The recomputation of activations."""
    attn: str
    """Attention implementation."""
    optimizer: str
    """The optimizer."""
    precision: str
    """Dtypes, in words."""
    basis: Basis | None
    """Kind of memory that the peak counts, or None without a published peak."""
    peak_bytes: int | None
    """Published peak of one GPU."""
    throughput: float | None
    """Published throughput as a number: per second, or a time in seconds for units that are times."""
    throughput_unit: str
    """Its unit."""
    notes: str
    """The notes as published."""
    quality: str
    """`A`: the configuration is known, `B`: something is missing, `C`: rounded or second-hand."""
    outcome: Outcome
    """How the run ended."""

    @property
    def lengths_vary(self) -> bool:
        """Whether samples may be shorter than `seq_len`, which is then an upper bound."""
        return self.publisher in (Publisher.SWIFT, Publisher.LITGPT, Publisher.H2O)

    @property
    def is_fsdp(self) -> bool:
        """Whether PyTorch's FSDP shards."""
        return "FSDP" in self.sharding

    def says(self, *words: str) -> bool:
        """Returns whether the notes have any of the words, case aside."""
        folded = self.notes.lower()
        return any(word.lower() in folded for word in words)

    def noted(self, name: str) -> str | None:
        """Returns the value of `name=value` (or `name value`) in the notes, or None."""
        match = re.search(rf"(?<![\w-]){re.escape(name)}[= ]([^\s;,]+)", self.notes)
        return match.group(1) if match else None

    @property
    def allocated_bytes(self) -> int | None:
        """Peak of torch's allocated bytes where the notes have it in bytes, else the column of that basis."""
        exact = self.noted("torch_peak_alloc_bytes")
        if exact is not None:
            return int(float(exact))
        mebibytes = self.noted("peak_allocated_MiB")
        if mebibytes is not None:
            return round(float(mebibytes) * MIB)
        return self.peak_bytes if self.basis in (Basis.ALLOCATED, Basis.ACTIVE) else None

    @property
    def nvidia_smi_bytes(self) -> int | None:
        """What nvidia-smi showed: in the notes, or the column of that basis."""
        mebibytes = self.noted("nvidia_smi_MiB")
        if mebibytes is not None:
            return round(float(mebibytes) * MIB)
        return self.peak_bytes if self.basis is Basis.NVIDIA_SMI else None


_PUBLISHERS = (
    *(
        (publisher.value, publisher)
        for publisher in Publisher
        if publisher not in (Publisher.NANOTRON, Publisher.OTHER)
    ),
    ("nanotron", Publisher.NANOTRON),
)
"""Text in the source, and its publisher."""

_TIMES = ("train time", "min ", "s/it")
"""Prefixes of units that are times, not rates."""


def read(path: Path) -> list[Row]:
    """Returns the rows of a table; any CSV with the same columns will do."""
    with path.open(encoding="utf-8", newline="") as stream:
        return [parse(record) for record in csv.DictReader(stream)]


def parse(record: Mapping[str, str]) -> Row:
    """Returns one row as a record. Raises KeyError for a missing column, ValueError for an invalid number."""
    source, notes = record["source"], record["notes"]
    publisher = next((who for word, who in _PUBLISHERS if word in source), Publisher.OTHER)
    gpus = int(record["n_gpus"] or 1)
    unit = record["throughput_unit"]
    return Row(
        id=record["id"],
        source=source,
        publisher=publisher,
        model=record["model"],
        params=float(record["params_b"]) * 1e9 if record["params_b"] else None,
        method=record["method"],
        zero_stage=int(record["zero_stage"][0]) if record["zero_stage"] else None,
        sharding=record["zero_stage"],
        offload=record["offload"],
        num_gpus=gpus,
        gpu=record["gpu"],
        seq_len=_count(record["seq_len"]),
        micro_batch=_count(record["micro_batch"]),
        grad_accum=_count(record["grad_accum"]),
        grad_ckpt=record["grad_ckpt"],
        attn=record["attn"],
        optimizer=record["optimizer"],
        precision=record["precision"],
        basis=Basis(record["mem_basis"]) if record["mem_basis"] and record["peak_mem_gb"] else None,
        peak_bytes=_peak_bytes(record["peak_mem_gb"], publisher, gpus, notes),
        throughput=_throughput(record["throughput"], unit),
        throughput_unit=unit,
        notes=notes,
        quality=notes[2:3] if notes.startswith("q=") else "C",
        outcome=_outcome(record, notes),
    )


def _count(text: str) -> int | None:
    return int(text) if text else None


def _peak_bytes(text: str, publisher: Publisher, gpus: int, notes: str) -> int | None:
    """Returns the peak of one GPU in bytes; LitGPT's gigabytes are decimal, the others' are binary."""
    if not text:
        return None
    unit = 10**9 if publisher is Publisher.LITGPT else GIB
    whole = float(text) * unit
    return round(whole / gpus if "scope=sum_over_gpus" in notes else whole)


def _throughput(text: str, unit: str) -> float | None:
    """Returns a rate, or seconds where the unit is a time: `1.8k` is 1800, `1:26:59` are 5219 s.

    >>> _throughput("1.8k", "tokens/s"), _throughput("1:26:59", "train time (as published)")
    (1800.0, 5219.0)
    """
    if not text:
        return None
    if ":" in text:
        seconds = 0.0
        for part in text.split(":"):
            seconds = 60 * seconds + float(part)
        return seconds
    value = float(text.removesuffix("k")) * (1000 if text.endswith("k") else 1)
    return 60 * value if unit.startswith("min ") else value


def is_time(unit: str) -> bool:
    """Returns whether a unit of throughput is a time."""
    return unit.startswith(_TIMES)


def _outcome(record: Mapping[str, str], notes: str) -> Outcome:
    """Returns how the run ended; a run of FMS's benchmark without a throughput failed, nearly always out of memory."""
    if re.search(r"OUTCOME=(OOM|FAILED)", notes):
        return Outcome.OUT_OF_MEMORY
    if "OUTCOME=FITS" in notes or record["peak_mem_gb"] or record["throughput"]:
        return Outcome.FITS
    return Outcome.UNKNOWN
