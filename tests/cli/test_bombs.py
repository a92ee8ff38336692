"""Small files that mean something huge: each is refused, with a word, in bounded time and memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT

pytestmark = pytest.mark.sweep

ALIASES = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))])
MERGES = "\n".join(["a0: &a0 {k: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 9))])
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 500,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
RUN, LINT, HOSTS = ("run", "-n"), ("lint", "ds_config.json"), ("hostfile", "check", "hostfile")
PLAN = ("plan", "--model", ".", "--gpus", "1", "--gpu", "a100-80g", "--seq-len", "128")


def model(**changes: object) -> str:
    return json.dumps(LLAMA | changes)


BOMBS = {
    "aliases": (RUN, "job.yaml", ALIASES, 3),
    "merged aliases": (RUN, "job.yaml", MERGES, 3),
    "an alias of itself": (RUN, "job.yaml", "a: &a [*a]", 3),
    "deep YAML": (RUN, "job.yaml", "[" * 50_000, 3),
    "a long YAML": (RUN, "job.yaml", "a: 1\n" * 500_000, 3),
    "words": (LINT, "ds_config.json", "[" + "true," * 400_000 + "true]", 3),
    "comments": (LINT, "ds_config.json", "/**/" * 400_000 + "{}", None),
    "comments without end": (LINT, "ds_config.json", "{" + "/*" * 400_000, 3),
    "repeated keys": (LINT, "ds_config.json", "{" + '"a": {"b": [1]},' * 20_000 + '"a": 1}', 3),
    "a long JSON": (LINT, "ds_config.json", "[" + "1," * 4_000_000 + "1]", 3),
    "deep JSON": (LINT, "ds_config.json", "[" * 500_000, 3),
    "a long number": (LINT, "ds_config.json", '{"a": ' + "9" * 2_000_000 + "}", 3),
    "layers": (PLAN, "config.json", model(num_hidden_layers=10**9), 3),
    "layers of a family that is not known": (PLAN, "config.json", model(model_type="opt", num_hidden_layers=10**9), 3),
    "experts": (PLAN, "config.json", model(model_type="qwen3_moe", num_experts=10**9), 3),
    "vocabulary": (PLAN, "config.json", model(vocab_size=10**300), 3),
    "a number of a million digits": (PLAN, "config.json", model(vocab_size=0).replace(": 0", f": {'9' * 10**6}"), 3),
    "a deep config.json": (PLAN, "config.json", "[" * 500_000, 3),
    "a range": (("hostfile", "write", "node[1-999999999]", "--slots", "8"), "x", "", 3),
    "many ranges": (("hostfile", "write", f"n[{','.join(['1-4096'] * 9999)}]", "--slots", "8"), "x", "", 3),
    "ranges of ranges": (("hostfile", "write", "n" + "[1-4096]" * 99, "--slots", "8"), "x", "", 3),
    "slots": (HOSTS, "hostfile", f"a slots={'9' * 10**6}\n", 3),
    "a long line": (HOSTS, "hostfile", "a" * 10**7, 3),
}


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))


@pytest.mark.parts(3)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_does_not_go_off(tmp_path: Path, name: str) -> None:
    words, file, text, code = BOMBS[name]
    (tmp_path / file).write_text(text)
    line = [sys.executable, "-P", "-m", "dstrain.cli", *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, preexec_fn=limited
    )
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert "MemoryError" not in done.stderr
    assert code is None or done.returncode == code, done.stderr[-2000:]
