"""How far three steps of SGD move the weights in bf16 under ZeRO-1 with fp32 accumulation: DeepSpeed#7788."""

from __future__ import annotations

from bf16_without_zero import by_engine, by_torch
from small_engine import answer

if __name__ == "__main__":
    fp32 = {"grad_accum_dtype": "fp32"}
    answer({"torch alone": by_torch(), "ZeRO-1": by_engine(1), "ZeRO-1, fp32": by_engine(1, data_types=fp32)})
