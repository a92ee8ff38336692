"""Trains recipes with `dstrain run` on this machine's GPU, a few steps each, and compares them with their plans.

Example: python benchmarks/recipes.py /dev/shm/recipes
         python benchmarks/recipes.py /dev/shm/recipes --only muon --only qlora --json recipes.json

Models have random weights in the shapes of published ones, some with fewer layers; texts are as long as a row. Runs
import their packages side by side and train one after the other. A recipe whose packages are missing fails, and the
others go on. Without a GPU models are tiny, which tries this program and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2VLImageProcessorPil

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file

from dstrain.facts.model import aliases
from dstrain.paths import python
from dstrain.train.demo import make_tokenizer, make_vision_tokenizer, save_model, write_rows

HERE = Path(__file__).resolve().parent
SEQ_LEN = 4096
SIDE = 1024
"""Width and height of a picture, in pixels, of which 16 × 16 are a patch."""
SETTINGS = {"max_steps": 14, "logging_steps": 2, "preflight": "false", "monitor.sinks": "[]"}
"""Keys of every job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model, and the options of `gen-config` for it."""

    model: str
    """An alias, and after a slash the layers to keep."""
    words: str
    """The arguments of `gen-config`, which also name the recipe."""
    data: str = "text"
    """Kind of rows."""
    rows: int = 2
    """Rows of a step: one micro-batch."""

    @property
    def name(self) -> str:
        """The recipe in a few words."""
        return f"{self.model} {self.words.replace('--', '')}"

    @property
    def options(self) -> list[str]:
        """All options of `gen-config` but the model and the data."""
        task = [] if "--task" in self.words or self.data == "images" else ["--task", "pretrain"]
        seen = ["--image-patches", str((SIDE // 16) ** 2)] if self.data == "images" else []
        length = [] if "--seq-len" in self.words else ["--seq-len", str(SEQ_LEN)]
        size = ["--micro-batch", str(self.rows), "--global-batch", str(self.rows)]
        return ["--gpus", "1", *task, *seen, *length, *size, *self.words.split()]


_SMALL = "qwen3-1.7b"
_WHOLE = "--zero-stage 2 --no-grad-ckpt"
_CKPT = "--zero-stage 2 --grad-ckpt"
_LORA = f"--method lora {_CKPT}"
RECIPES = (
    *(
        Recipe(model=_SMALL, words=words)
        for words in (
            _WHOLE,
            f"{_WHOLE} --liger",
            f"{_WHOLE} --optimizer adamw_8bit",
            f"{_WHOLE} --optimizer muon",
            f"{_WHOLE} --torch-compile",
            f"{_CKPT} --activation-offload",
            f"{_CKPT} --offload optimizer",
        )
    ),
    Recipe(model="qwen3-8b", words=f"--method qlora {_CKPT}"),
    Recipe(model="qwen3-8b", words=_LORA),
    Recipe(model="qwen3-30b-a3b/8", words=_LORA),
    Recipe(model="qwen3-vl-4b", words=_LORA, data="images"),
    Recipe(model="qwen3.5-9b/12", words=_LORA),
    *(
        Recipe(model=_SMALL, words=words)
        for words in (
            f"{_CKPT} --grad-ckpt-every-n-layers 1",
            f"{_CKPT} --grad-ckpt-every-n-layers 2",
            f"{_WHOLE} --loss full",
            f"{_WHOLE} --loss chunked",
            f"{_WHOLE} --optimizer adamw_bf16",
            "--zero-stage 3 --no-grad-ckpt",
            "--zero-stage 3 --grad-ckpt --offload params",
        )
    ),
    Recipe(model=_SMALL, words=f"{_CKPT} --tiled-mlp --seq-len 32768", rows=1),
    Recipe(model=_SMALL, words=f"--task dpo --method lora {_WHOLE}", data="pairs", rows=1),
    Recipe(model="qwen3-vl-4b", words=f"{_CKPT} --no-freeze-vision-tower", data="images", rows=1),
    Recipe(model="qwen3-8b", words=f"{_CKPT} --optimizer adamw_bf16"),
    Recipe(model="qwen3-8b", words="--method lora --zero-stage 3 --grad-ckpt"),
    Recipe(model="qwen3-8b", words="--method qlora --zero-stage 3 --grad-ckpt"),
)
"""The most informative first, since time may run out."""


def pages() -> list[str]:
    """Returns this project's documentation."""
    return [page.read_text(encoding="utf-8") for page in sorted((HERE.parent / "docs").glob("*.md"))]


def make_data(folder: Path) -> None:
    """Writes a file of rows for each kind of data, each longer than a row of a micro-batch."""
    folder.mkdir(parents=True)
    chosen, words = random.Random(0), sorted({word for page in pages() for word in page.split() if word.isalnum()})

    def text() -> str:
        return " ".join(chosen.choices(words, k=8 * SEQ_LEN))

    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    def pairs() -> dict[str, Any]:
        answers = {name: [turn("assistant", text())] for name in ("chosen", "rejected")}
        return {"prompt": [turn("user", "Say it.")], **answers}

    def image() -> dict[str, Any]:
        return {"messages": [turn("user", "What is it?"), turn("assistant", text())], "images": ["noise.png"]}

    from PIL import Image

    Image.effect_noise((SIDE, SIDE), 64).convert("RGB").save(folder / "noise.png")
    for kind, row in {"text": lambda: {"text": text()}, "pairs": pairs, "images": image}.items():
        write_rows(folder / f"{kind}.jsonl", (row() for _ in range(32)))


def config_of(name: str, *, tiny: bool) -> dict[str, Any]:
    """Returns the configuration of a model, with as many layers as its name says; `tiny`: 4 layers, 128 wide."""
    alias, _, layers = name.partition("/")
    found = aliases.resolve(alias)
    assert found is not None
    config: dict[str, Any] = json.loads(json.dumps(dict(found[1].config)))
    inner = config.get("text_config", config)
    inner |= {"num_hidden_layers": int(layers)} if layers else {}
    if tiny:
        inner |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 4096}
        inner |= {"num_experts": 8, "moe_intermediate_size": 64} if "num_experts" in inner else {}
        tower = config.get("vision_config", {})
        tower |= {"depth": 3, "out_hidden_size": 128, "deepstack_visual_indexes": [0, 1]} if tower else {}
    return config


def make_model(name: str, folder: Path) -> None:
    """Writes a model with random weights in bf16, and a tokenizer; also what reads pictures, if it has a tower."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = config_of(name, tiny=device == "cpu")
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    with torch.device(device):
        if config["model_type"] == "qwen3_vl":
            tokenizer = make_vision_tokenizer(pages())
            save_model(folder, tokenizer, text=config["text_config"], tower=config["vision_config"])
            size = {"shortest_edge": 65536, "longest_edge": SIDE**2}
            Qwen2VLImageProcessorPil(patch_size=16, size=size).save_pretrained(folder)
            return
        kind: Any = AutoModelForCausalLM
        model = kind.from_config(AutoConfig.for_model(**config.get("text_config", config)))
        model.save_pretrained(folder)
    make_tokenizer(pages()).save_pretrained(folder)


def call(words: Sequence[str], folder: Path, **env: str) -> str:
    """Returns the output of a command of dstrain; raises RuntimeError with the end of its messages."""
    command = python("-m", "dstrain.cli", *words)
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, **env}, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[0]}: {done.stderr[-2000:]}")
    return done.stdout


def train(recipe: Recipe, model: Path, place: Path) -> dict[str, Any]:
    """Returns planned and measured values of a recipe by quantity, or its `error`; writes to a folder of its own."""
    place.mkdir(parents=True)
    folder = place.parents[1]
    path = os.pathsep.join([str(HERE / "one_at_a_time"), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, "DSTRAIN_BENCHMARK_LOCK": str(folder / "lock")}
    data = str(folder / "data" / f"{recipe.data}.jsonl")
    small = [] if torch.cuda.is_available() else ["--gpu", "h200", "--seq-len", "1280"]
    sets = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    try:
        call(["gen-config", "--model", str(model), "--data", data, *recipe.options, *small], place, **env)
        call(["run", *sets, "--hang-after", "0", "--ignore", "DS804"], place, **env)
        (found,) = json.loads(call(["report", "output", "--json"], place, **env))["runs"]
    except RuntimeError as error:
        return {"name": recipe.name, "error": str(error)}
    both = {one["quantity"]: [one["planned"], one["measured"]] for one in found["comparisons"]}
    waited = {"data_wait_share": found["data_wait_share"], "warm_up_steps": found["warm_up_steps"]}
    return {"name": recipe.name, **both, **waited}


def measure(recipes: Sequence[Recipe], folder: Path, workers: int, minutes: float) -> Iterator[dict[str, Any]]:
    """Yields a result for every recipe, in order; none starts after the time limit."""
    deadline = time.monotonic() + 60 * minutes
    make_data(folder / "data")
    places = {name: folder / "models" / name.replace("/", "-") for name in dict.fromkeys(one.model for one in recipes)}
    makers = {
        name: subprocess.Popen(python(str(HERE / "recipes.py"), str(place), "--make", name))
        for name, place in places.items()
    }
    for maker in makers.values():
        if maker.wait():
            sys.exit("error: a model could not be made")

    def one(number: int) -> dict[str, Any]:
        recipe = recipes[number]
        if time.monotonic() > deadline:
            return {"name": recipe.name, "error": "no time left"}
        return train(recipe, places[recipe.model], folder / "runs" / str(number))

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(one, range(len(recipes)))


def cell(values: Any, unit: float) -> str:
    """Returns planned, measured and error of a quantity.

    >>> cell([3.0, 2.0], 1.0)
    '     3.00/2.00       +50.0%'
    """
    planned, measured = values or (None, None)
    if not planned or not measured:
        return f"{'–':>22}"
    return f"{planned / unit:9.2f}/{measured / unit:<8.2f}{planned / measured - 1:+7.1%}"


COLUMNS = {"step_s": 1.0, "states_bytes_per_gpu": 2**30, "peak_bytes_per_gpu": 2**30, "reserved_bytes_per_gpu": 2**30}
"""Quantity → unit."""


def shown(results: Iterator[dict[str, Any]], width: int) -> Iterator[dict[str, Any]]:
    """Yields results, and prints each as a line of a table."""
    print(f"{'planned/measured, error':{width}} " + "".join(f"{name.partition('_')[0]:>24}" for name in COLUMNS))
    for result in results:
        told = result.get("error") or "".join(f"  {cell(result.get(name), unit)}" for name, unit in COLUMNS.items())
        print(f"{result['name']:{width}} {told}", flush=True)
        yield result


def main() -> None:
    """Trains the recipes and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for models, data and runs; must not exist")
    parser.add_argument("--only", action="append", metavar="TEXT", help="recipes whose name has it; may be repeated")
    parser.add_argument("--workers", type=int, default=4, help="runs that start side by side (default: 4)")
    parser.add_argument("--minutes", type=float, default=60, help="start no run after this time (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go")
    parser.add_argument("--make", metavar="NAME", help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.make:
        make_model(given.make, folder)
        return
    recipes = [one for one in RECIPES if any(text in one.name for text in given.only or [""])]
    results = list(
        shown(
            measure(recipes, folder, given.workers, given.minutes), max((len(one.name) for one in recipes), default=0)
        )
    )
    if given.json:
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        versions = {"torch": torch.__version__}
        given.json.write_text(json.dumps({"machine": machine, **versions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
