"""The FLOPs of Muon's orthogonalisation are those of DeepSpeed's own function."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dstrain.plan.memory.optimizer_states import muon_flops


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("rows", "columns"), [(16, 48), (48, 16), (32, 32)])
def test_flops_are_those_that_pytorch_counts(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # it is compiled where it is defined
    muon = pytest.importorskip("deepspeed.runtime.zero.muon.original_muon")
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        muon.zeropower_via_gram_newtonschulz(torch.randn(rows, columns), steps=5)
    assert muon_flops(rows, columns) == counter.get_total_flops()
