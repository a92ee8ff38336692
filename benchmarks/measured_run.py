"""Trains one configuration for a few steps on this machine and writes what it needed: the child of `measure.py`.

`python benchmarks/measured_run.py SPEC ANSWER`: SPEC and ANSWER are JSON files, and a line on stdin starts it. The
engine is DeepSpeed's own with one rank, the model Transformers' with random weights, made where it trains. On a GPU
torch and its allocator tell the peak; on a CPU a count of live storages does.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK_BYTES = 512
"""The CUDA allocator rounds every tensor up to a multiple of this, as do the plan and the CPU's count."""
PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.bmm.default})
"""Matrix products."""


def in_fp32(product: Any, factors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Returns a matrix product on a CPU, computed in fp32: bf16 can take forty times as long.

    The copies live only while the product is computed and are not counted: a GPU makes none.
    """
    out: torch.Tensor = product(*(factor.float() for factor in factors)).to(factors[0].dtype)
    return out


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts each storage that an operation returns until its last tensor is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, Any] = {}
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = in_fp32(func, args) if func in PRODUCTS else func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and leaf.layout is torch.strided:
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self._known[key] = weakref.ref(storage, self._freer(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _freer(self, key: int, size: int) -> Callable[[Any], None]:
        def free(_: Any) -> None:
            del self._known[key]
            self.live -= size

        return free


def build(spec: dict[str, Any], device: torch.device) -> Any:
    """Returns the model in bf16 on the device; under ZeRO-3 Transformers partitions it as it is made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**spec["config"])
    with device:
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16, attn_implementation=spec["attn"]
        )
    model.config.use_cache = False
    if spec["liger"]:
        from liger_kernel.transformers import (  # type: ignore[import-not-found, unused-ignore]
            _apply_liger_kernel_to_instance,
        )

        _apply_liger_kernel_to_instance(model=model)
    if spec["lora"]:
        model = adapted(model, spec)
    if spec["grad_ckpt"]:
        model.gradient_checkpointing_enable({"use_reentrant": bool(spec["lora"]) and stage(spec) == 3})
    return model.train()


def adapted(model: Any, spec: dict[str, Any]) -> Any:
    """Returns the model with an adapter, as `dstrain.train.model` makes it."""
    from peft import LoraConfig, get_peft_model

    if spec["grad_ckpt"]:
        model.enable_input_require_grads()
    lora = LoraConfig(**spec["lora"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad and stage(spec) < 3:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def stage(spec: dict[str, Any]) -> int:
    """Returns the ZeRO stage."""
    return int(spec["ds_config"]["zero_optimization"]["stage"])


def optimizer(model: Any, spec: dict[str, Any]) -> Any:
    """Returns the optimizer that the Trainer makes, with its two groups."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dims = {id(parameter): len(getattr(parameter, "ds_shape", parameter.shape)) for parameter in trained}
    groups = [
        {"params": [parameter for parameter in trained if dims[id(parameter)] > 1], "weight_decay": 0.01},
        {"params": [parameter for parameter in trained if dims[id(parameter)] <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if "offload_optimizer" in spec["ds_config"]["zero_optimization"]:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-untyped]

        return DeepSpeedCPUAdam(groups, lr=1e-5)
    return torch.optim.AdamW(groups, lr=1e-5, fused=True)


def train(spec: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns the measurements: bytes over all steps but the first, and step times."""
    import deepspeed  # type: ignore[import-untyped]
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    from dstrain.train.memory import allocate_states

    on_gpu = device.type == "cuda"
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, dist_backend="nccl" if on_gpu else "gloo")
    # Transformers looks at it through a weak link
    kept = HfDeepSpeedConfig(copy.deepcopy(spec["ds_config"]))  # type: ignore[no-untyped-call]
    counter = None if on_gpu else LiveBytes()
    with counter or nullcontext():
        model = build(spec, device)
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer(model, spec), config=spec["ds_config"])
        allocate_states(engine)
        del model, kept
        ids = torch.randint(0, spec["config"]["vocab_size"], (spec["micro_batch"], spec["seq_len"]), device=device)
        init_bytes = counter.peak if counter else torch.cuda.max_memory_allocated()
        step(engine, ids, spec)
        if counter:
            counter.peak = counter.live
        else:
            torch.cuda.reset_peak_memory_stats()
        losses = [step(engine, ids, spec) for _ in range(2)]
        seconds = [timed(engine, ids, spec, device) for _ in range(spec["steps"])]
    figures = {"init_bytes": init_bytes, "step_s": statistics.median(seconds), "steps_s": seconds, "losses": losses}
    if counter:
        return figures | {"live_bytes": counter.peak, "steady_bytes": counter.live}
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return figures | {
        "live_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "retries": stats["num_alloc_retries"],
    }


def step(engine: Any, ids: torch.Tensor, spec: dict[str, Any]) -> float:
    """Takes one optimizer step, and returns its last loss."""
    mask = torch.ones_like(ids)
    if ids.shape[0] > 1:  # as the plan has it: rows of several samples are padded
        mask[:, -1] = 0
    for _ in range(spec["grad_accum"]):
        loss = engine(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        last = loss.detach()
        del loss
    return float(last)


def timed(engine: Any, ids: torch.Tensor, spec: dict[str, Any], device: torch.device) -> float:
    """Returns the seconds of one optimizer step."""
    started = time.perf_counter()
    step(engine, ids, spec)  # its loss is read, so the device has come that far
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def versions(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of packages that are installed."""
    return {name: metadata.version(name) for name in names if find_spec(name.replace("-", "_")) is not None}


def main(spec_file: Path, answer_file: Path) -> None:
    """Measures when a line comes on stdin, and writes the answer; out of memory is an answer too."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    for package in ("deepspeed", "peft" if spec["lora"] else "transformers"):
        import_module(package)  # before the device is touched
    sys.stdin.readline()
    on_gpu = os.environ.get("DS_ACCELERATOR") != "cpu"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    answer: dict[str, Any] = {"versions": versions(("torch", "transformers", "deepspeed", "peft", "liger-kernel"))}
    try:
        answer |= {"outcome": "ok", **train(spec, device)}
    except torch.OutOfMemoryError as error:
        answer |= {"outcome": "out of memory", "error": str(error).splitlines()[0]}
        answer["live_bytes"] = torch.cuda.max_memory_allocated()
        answer["reserved_bytes"] = torch.cuda.max_memory_reserved()
    answer_file.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
