"""Writes docs/models/: for each known model, what `dstrain plan` chooses on five clusters.

Examples: python -m docs.model_pages
          python -m docs.model_pages qwen3-8b qwen3-32b
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.questions import asked
from dstrain.choices import Method
from dstrain.errors import DoesNotFit
from dstrain.facts import probe
from dstrain.facts.model import aliases, families
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.labels import label
from dstrain.plan.search.decide import decide
from dstrain.units import format_count

FOLDER = Path(__file__).parent / "models"
CLUSTERS = (
    "--gpus 1 --gpu 4090",
    "--gpus 8 --gpu 4090",
    "--gpus 8 --gpu a100-80g",
    "--gpus 8 --gpu h100-sxm",
    "--gpus 32 --gpu h100-sxm",
)
"""Options of plan and gen-config: one card, and boxes with and without fast links."""
METHODS = {Method.FULL: "Full fine-tuning · 全参数微调", Method.LORA: "LoRA"}
"""Method → its heading."""
HEAD = "| options 选项 | plan 方案 | GPU GiB 显存 | host GiB/node 内存 | tokens/s/GPU 吞吐 |\n|---|---|--:|--:|--:|"
FOOT = """\
Sequences of 4,096 tokens; host RAM as dstrain assumes it for such GPUs (`--host-memory` says what is there);
predictions, with errors as [measured](../accuracy.md). A row as files: `dstrain gen-config --model {name}` with its
options.

序列长 4096；主机内存为 dstrain 对这类 GPU 的假定值（用 `--host-memory` 给出实际值）；
数字是预测，误差见[准确度](../zh/accuracy.md)。
要得到某一行的文件：`dstrain gen-config --model {name}` 加上该行的选项。
"""
INDEX = """# Models · 模型

What `dstrain plan` chooses for each model that it knows by name, on five clusters; `python -m docs.model_pages` writes
these pages. Any other model: `dstrain plan --model FOLDER_OR_ID`.

`dstrain plan` 为每个已知名字的模型在五种集群上给出的方案，由 `python -m docs.model_pages` 生成。
其他模型：`dstrain plan --model FOLDER_OR_ID`。

## All models · 全部模型

"""


def row(name: str, cluster: str, method: Method) -> str:
    """Returns the line of a table: a plan in figures, or why there is none."""
    question = asked(shlex.split(f"--model {name} {cluster} --method {method}"))
    try:
        chosen = decide(question.workload, question.request).chosen
    except DoesNotFit as error:
        return f"| `{cluster}` | {error.problem.splitlines()[0]} | – | – | – |"
    memory = chosen.memory
    gpu, host = memory.device_bytes_per_gpu / 2**30, memory.host_bytes_per_node / 2**30
    speed = f"{chosen.speed.tokens_per_s_per_gpu:,.0f}" if chosen.speed is not None else "–"
    return f"| `{cluster}` | {label(chosen.configuration)} | {gpu:.1f} | {host:,.0f} | {speed} |"


def about(model: ModelFacts) -> str:
    """Returns the first lines of a page."""
    size = f"{format_count(model.num_params)} parameters 参数"
    layers = f"{model.num_hidden_layers} layers 层"
    length = f"own length 原生长度 {model.max_position_embeddings:,} tokens" if model.max_position_embeddings else ""
    kind = "mixture of experts 混合专家" if model.moe is not None else "dense 稠密"
    vision = "vision-language 视觉语言" if model.vision is not None else ""
    return f"# {model.name}\n\n{' · '.join(part for part in (size, kind, vision, layers, length) if part)}\n"


def page(name: str) -> str:
    """Returns the page of a model."""
    tables = [
        "\n".join([f"## {heading}\n", HEAD, *(row(name, cluster, method) for cluster in CLUSTERS)]) + "\n"
        for method, heading in METHODS.items()
    ]
    return "\n".join([about(probe.read_model(name)), *tables, FOOT.format(name=name)])


def index() -> str:
    """Returns the page that leads to all others."""
    return INDEX + "\n".join(f"- [{name}]({name}.md)" for name in families.known()) + f"\n\n{_traced()}\n"


def _traced() -> str:
    """Returns which other models have names of their own."""
    names = [name for name in aliases.known() if name not in families.known()]
    return f"Layers of {', '.join(names)} are traced with Transformers when one of them is planned: they have no page."


def write(name: str) -> None:
    """Writes the page of a model."""
    (FOLDER / f"{name}.md").write_text(page(name), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of models; all without")
    names = parser.parse_args(arguments).models or families.known()
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "index.md").write_text(index(), encoding="utf-8")
    with ProcessPoolExecutor() as pool:
        for name, _ in zip(names, pool.map(write, names), strict=True):
            print(FOLDER / f"{name}.md")


if __name__ == "__main__":
    main()
