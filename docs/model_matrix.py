"""Writes docs/models.md: what `dstrain plan` chooses for each known model on each of five clusters.

Example: python -m docs.model_matrix
"""

from __future__ import annotations

import shlex
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.questions import asked
from dstrain.choices import Method
from dstrain.errors import DoesNotFit
from dstrain.facts.model import aliases, families
from dstrain.plan.labels import short_label
from dstrain.plan.search.decide import decide
from dstrain.units import GIB

PAGE = Path(__file__).parent / "models.md"
CLUSTERS = (
    "--gpus 1 --gpu 4090",
    "--gpus 8 --gpu 4090",
    "--gpus 8 --gpu a100-80g",
    "--gpus 8 --gpu h100-sxm",
    "--gpus 32 --gpu h100-sxm",
)
"""Options of plan and gen-config: one card, and boxes with and without fast links."""
HEAD = """\
# Models and machines

For each model that dstrain knows by name, the plan on five clusters: the method (full fine-tuning if it fits, else
LoRA, else QLoRA), the ZeRO stage with what is offloaded, GiB per GPU, and tokens/s per GPU. Sequences have 4,096
tokens; host RAM is assumed as usual for such GPUs (`--host-memory` sets it); figures are predictions
([accuracy](accuracy.md)).

The files of a cell: `dstrain gen-config --model MODEL` with the options above it and `--method`. Any other model:
`dstrain plan --model FOLDER_OR_ID`.

"""


def cell(name: str, cluster: str) -> str:
    """Returns the plan of the first method that fits."""
    for method in (Method.FULL, Method.LORA, Method.QLORA):
        question = asked(shlex.split(f"--model {name} {cluster} --method {method}"))
        try:
            chosen = decide(question.workload, question.request).chosen
        except DoesNotFit:
            continue
        zero = short_label(chosen.configuration).partition(" ")[0]
        speed = f"{chosen.speed.tokens_per_s_per_gpu:,.0f}/s" if chosen.speed is not None else "–"
        return f"{method} {zero}, {chosen.memory.device_bytes_per_gpu / GIB:.1f} GiB, {speed}"
    return "–"


def row(name: str) -> str:
    """Returns a model's line of the table."""
    return f"| {name} | {' | '.join(cell(name, cluster) for cluster in CLUSTERS)} |"


def foot() -> str:
    """Returns the names of the models that have no row."""
    names = [name for name in aliases.known() if name not in families.known()]
    return f"{', '.join(names)} have names too; their layers are traced with Transformers when they are planned."


def main() -> None:
    """Writes the page."""
    head = f"| model | {' | '.join(f'`{cluster}`' for cluster in CLUSTERS)} |\n|---|{'---|' * len(CLUSTERS)}"
    with ProcessPoolExecutor() as pool:
        rows = "\n".join([head, *pool.map(row, families.known())])
    PAGE.write_text(f"{HEAD}{rows}\n\n{foot()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
