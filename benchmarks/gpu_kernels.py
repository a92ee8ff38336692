"""Times the kernels on which the plan's figures rest, alone on this machine's GPU.

Example: python benchmarks/gpu_kernels.py
         python benchmarks/gpu_kernels.py --only packed --only optimizer --json kernels.json

Each is timed with the clock around several calls and a synchronization, after two calls; the median of five counts.
Shapes are those of Qwen3: 16 or 32 heads of 128, a vocabulary of 151,936.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file

from dstrain.train.data.isolation import _sdpa, by_sample
from dstrain.train.loss import _fused

Row = dict[str, Any]
VOCABULARY = 151_936
PARAMS = 2**29


def seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """Returns the median time of one call."""

    def timed() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / repeats

    for _ in range(2):
        call()
    return statistics.median(timed() for _ in range(5))


def random(*shape: int, grad: bool = False) -> torch.Tensor:
    """Returns normal numbers in bf16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def products() -> Iterator[Row]:
    """Times linears of MLPs: (tokens, width) times (width, inner)."""
    for tokens, width, inner in ((2048, 1024, 3072), (4096, 2048, 6144), (8192, 4096, 12288), (8192, 5120, 25600)):
        x, weight = random(tokens, width), random(inner, width)
        took = seconds(partial(F.linear, x, weight), 30)
        yield {"tokens": tokens, "width": width, "inner": inner, "tflops": 2 * tokens * width * inner / took / 1e12}


def memory() -> Iterator[Row]:
    """Times copies on the GPU, and between it and the host."""
    x = random(2**30)
    y = torch.empty_like(x)
    yield {"copy": "2 GiB on the GPU", "gb_per_s": 4 * x.numel() / seconds(lambda: y.copy_(x), 5) / 1e9}
    on_gpu = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    for words, pin in (("pinned", True), ("pageable", False)):
        on_host = torch.empty(2**30, dtype=torch.uint8, pin_memory=pin).fill_(1)
        up = seconds(partial(on_gpu.copy_, on_host, non_blocking=pin))
        down = seconds(partial(on_host.copy_, on_gpu, non_blocking=pin))
        yield {"copy": f"1 GiB to the GPU, {words}", "gb_per_s": 2**30 / up / 1e9}
        yield {"copy": f"1 GiB to the host, {words}", "gb_per_s": 2**30 / down / 1e9}


def packed() -> Iterator[Row]:
    """Times attention over packed rows, forward and backward: samples one by one, and all of them at once."""
    attention, module, width = by_sample(_sdpa), SimpleNamespace(num_key_value_groups=2, is_causal=True), 4096
    for sample, rows in ((64, 8), (256, 8), (1024, 8), (4096, 8), (4096, 1)):
        count = width // sample
        query, key, value = (random(rows, width, heads, 128, grad=True) for heads in (16, 8, 8))
        borders = torch.tensor([0, *itertools.accumulate([sample] * count * rows)], dtype=torch.int32, device="cuda")
        positions = torch.arange(sample).repeat(count).repeat(rows, 1).cuda()

        def run(options: Mapping[str, Any], *tensors: torch.Tensor, positions: torch.Tensor = positions) -> None:
            heads_first = (tensor.transpose(1, 2) for tensor in tensors)
            output, _ = attention(module, *heads_first, None, position_ids=positions, dropout=0.0, **options)
            output.sum().backward()  # type: ignore[no-untyped-call]

        at_once = {"cu_seq_lens_q": borders, "max_length_q": sample}
        for words, options in (("one by one", {}), ("at once", at_once)):
            took = seconds(partial(run, options, query, key, value))
            yield {"attended": words, "rows": rows, "tokens_per_sample": sample, "ms": 1e3 * took}


def loss() -> Iterator[Row]:
    """Times head and loss of 8,192 tokens, forward and backward, of which all or a third have a target."""
    for width, share in itertools.product((1024, 4096), (1.0, 0.33)):
        weight = (0.02 * random(VOCABULARY, width)).detach().requires_grad_()
        hidden = random(8192, width, grad=True)
        targets = torch.randint(0, VOCABULARY, (8192,), device="cuda")
        targets[torch.rand(8192, device="cuda") > share] = -100

        def fused(hidden: torch.Tensor = hidden, weight: torch.Tensor = weight, y: torch.Tensor = targets) -> None:
            hidden.grad = weight.grad = None
            _fused(hidden, weight, y).backward()  # type: ignore[no-untyped-call]

        def full(hidden: torch.Tensor = hidden, weight: torch.Tensor = weight, y: torch.Tensor = targets) -> None:
            hidden.grad = weight.grad = None
            F.cross_entropy(F.linear(hidden, weight).float(), y, reduction="sum").backward()  # type: ignore[no-untyped-call]

        for words, call in (("fused", fused), ("full", full)):
            torch.cuda.reset_peak_memory_stats()
            before, took = torch.cuda.memory_allocated(), seconds(call)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
            yield {"loss": words, "width": width, "with_target": share, "ms": 1e3 * took, "peak_gib": peak}


def optimizer() -> Iterator[Row]:
    """Times one step over 2^29 parameters in fp32, on the GPU, and of half as many on the CPU."""
    params = [torch.zeros(PARAMS // 8, device="cuda").requires_grad_() for _ in range(8)]
    for param in params:
        param.grad = torch.ones_like(param)
    yield {"optimizer": "adamw, fused", "ms": 1e3 * seconds(torch.optim.AdamW(params, fused=True).step)}
    try:
        import bitsandbytes  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        print("bitsandbytes is not installed: no 8-bit AdamW", file=sys.stderr)
    else:
        yield {"optimizer": "adamw_8bit", "ms": 1e3 * seconds(bitsandbytes.optim.AdamW8bit(params).step)}
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-untyped]

    on_host = torch.zeros(PARAMS // 2).requires_grad_()
    on_host.grad = torch.ones_like(on_host)
    took = seconds(DeepSpeedCPUAdam([on_host]).step)
    yield {"optimizer": "CPU Adam, half as many", "ms": 1e3 * took, "threads": torch.get_num_threads()}


def delta() -> Iterator[Row]:
    """Times Gated DeltaNet of Qwen3.5-9B over a row of 4,096 tokens, without flash-linear-attention."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5 import modeling_qwen3_5

    qwen: Any = modeling_qwen3_5
    config = Qwen3_5TextConfig(hidden_size=4096, linear_num_value_heads=32, linear_num_key_heads=16)
    with torch.device("cuda"):
        net = qwen.Qwen3_5GatedDeltaNet(config, 0).to(torch.bfloat16)
    qwen.torch_chunk_gated_delta_rule = qwen.torch_chunk_gated_delta_rule.__wrapped__
    x = random(1, 4096, 4096, grad=True)
    yield {"layer": "gated DeltaNet, PyTorch alone", "ms": 1e3 * seconds(lambda: net(x).sum().backward())}


KINDS = {each.__name__: each for each in (products, memory, packed, loss, optimizer, delta)}


def main() -> None:
    """Prints a line for each measurement; writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=KINDS, help="kind of kernel; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows go as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this machine has no GPU that PyTorch sees")
    rows: dict[str, list[Row]] = {}
    for kind in options.only or KINDS:
        for row in KINDS[kind]():
            rows.setdefault(kind, []).append(row)
            print(
                kind,
                *(
                    f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
                    for name, value in row.items()
                ),
                sep="  ",
                flush=True,
            )
        torch.cuda.empty_cache()
    if options.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
