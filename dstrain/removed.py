"""Names that earlier versions knew and this one refuses, each with the way that remains."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_EXPORTED = "export-config says what a job needs without DeepSpeed."
_TRAINED = "Jobs train with adamw, adamw_8bit, adamw_bf16 and muon."
_COMPUTED = "Jobs train with full, chunked and fused."
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "plan --states": _EXPORTED,
        "plan --double-quant": "QLoRA's scales are always quantised too.",
        "plan --no-double-quant": "QLoRA's scales are always quantised too.",
        "plan --optimizer=adamw_fused": _TRAINED,
        "plan --optimizer=adafactor": _TRAINED,
        "plan --optimizer=lion": _TRAINED,
        "plan --optimizer=sgd": _TRAINED,
        "plan --loss=in-place": _COMPUTED,
        "plan --loss=liger": _COMPUTED,
        "plan --loss=tiled": _COMPUTED,
    }
)
"""Words of a command line → what to type instead: `watch`, `run --sync`, `plan --task=kto`."""
JOB: Mapping[str, str] = MappingProxyType({})
"""Keys of job.yaml, or one of their values → what to write instead: `kto`, `monitor.notify`, `task=kto`."""
