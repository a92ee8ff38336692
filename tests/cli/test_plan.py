"""`dstrain plan`: its JSON, its bars, its exit codes; and that it writes nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Offload
from dstrain.facts.model import aliases
from dstrain.plan.configuration import DEFAULTS, Configuration, changed, choices
from dstrain.plan.labels import label, short_label
from tests.cli.conftest import ROOT, Type, lay_traps
from tests.train import vision_families

PLAN = ("plan", "--gpus", "16", "--model", "qwen3-32b")
NOTHING_FITS = ("plan", "--gpus", "1", "--gpu", "t4", "--model", "qwen3-8b", "--host-memory", "64GiB")
ONE: tuple[str, ...] = (
    *("plan", "--gpus", "8", "--gpu", "h100", "--model", "qwen3-8b", "--zero-stage", "2", "--offload", "none"),
    *("--micro-batch", "2", "--grad-accum", "3", "--grad-ckpt"),
)

TOP_KEYS = {"schema", "model", "cluster", "plans", "chosen", "considered"}
PLAN_KEYS = {"title", *choices(), "fits", "memory", "speed", "reasons"}
MEMORY_KEYS = {
    *("live_bytes_per_gpu", "reserved_bytes_per_gpu", "device_bytes_per_gpu", "peak_instant", "breakdown_bytes"),
    *("host_bytes_per_node", "nvme_bytes_per_node", "checkpoint_bytes", "load"),
}
BREAKDOWN_KEYS = {
    *("params", "grads", "optimizer", "buffers", "gathered", "activations", "logits", "workspace", "fragmentation"),
    "context",
}
SPEED_KEYS = {"step_s", "tokens_per_s_per_gpu", "mfu_ratio", "limited_by", "uncertainty_ratio"}


def document(dstrain: Type, *words: str, code: int = 0) -> dict[str, Any]:
    """Returns the JSON that a command prints."""
    done = dstrain(*words, "--json")
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_json_is_the_contract(dstrain: Type, tmp_path: Path) -> None:
    found = document(dstrain, *PLAN)
    assert list(tmp_path.iterdir()) == []
    assert set(found) == TOP_KEYS
    assert found["schema"] == 1
    assert found["model"] == {
        "name": "qwen3-32b",
        "num_params": 32_762_123_264,
        "num_active_params": 32_762_123_264,
        "num_trainable_params": 32_762_123_264,
    }
    assert found["chosen"] == 0
    assert set(found["considered"]) == {"estimated", "excluded_by_bound"}
    for each in found["plans"]:
        memory = each["memory"]
        assert set(each) == PLAN_KEYS
        assert set(memory) == MEMORY_KEYS
        assert set(memory["breakdown_bytes"]) == BREAKDOWN_KEYS
        assert set(each["speed"]) == SPEED_KEYS
        assert each["fits"] is True
        assert sum(memory["breakdown_bytes"].values()) == memory["device_bytes_per_gpu"]
        assert memory["breakdown_bytes"]["fragmentation"] >= 0
    speed = found["plans"][0]["speed"]
    assert (0 < speed["mfu_ratio"] < 1, speed["limited_by"]) == (True, "compute")
    assert len(document(dstrain, *PLAN, "--top", "2")["plans"]) == 2


def test_every_choice_given_is_an_estimate_of_it(dstrain: Type) -> None:
    (only,) = document(dstrain, *ONE)["plans"]
    chosen = {name: only[name] for name in ("zero_stage", "offload", "micro_batch", "grad_accum", "grad_ckpt")}
    assert chosen == {"zero_stage": 2, "offload": "none", "micro_batch": 2, "grad_accum": 3, "grad_ckpt": True}
    assert (only["sp"], only["tp"]) == (1, 1)


def test_an_estimate_answers_also_where_it_does_not_fit(dstrain: Type) -> None:
    found = document(dstrain, *ONE[:-5], "--micro-batch", "64", "--no-grad-ckpt", code=4)
    (only,) = found["plans"]
    assert (found["chosen"], only["micro_batch"], only["fits"]) == (None, 64, False)
    assert only["memory"]["device_bytes_per_gpu"] > 80 * 2**30


def test_where_nothing_fits_the_nearest_are_listed_and_the_code_is_4(dstrain: Type) -> None:
    done = dstrain(*NOTHING_FITS, "--json", "--top", "3")
    found = json.loads(done.stdout)
    assert (done.returncode, found["chosen"], len(found["plans"])) == (4, None, 3)
    assert not any(each["fits"] for each in found["plans"])
    assert all(text in done.stderr for text in ("does not fit", "These options fit"))


def test_a_limit_of_gpu_memory_is_planned_with(dstrain: Type) -> None:
    half = ("--gpus", "1", "--gpu", "h100", "--model", "qwen3-0.6b", "--gpu-memory-limit", "40GiB")
    assert "1 × h100-sxm (40.0 GiB)" in dstrain("plan", *half).stdout
    for size in ("100GiB", "1KiB"):
        refused = dstrain("plan", *half[:-1], size)
        assert (refused.returncode, "h100-sxm has 79.6 GiB" in refused.stderr) == (3, True)


def test_where_assumed_ram_is_what_lacks_the_assumption_and_the_option_are_named(dstrain: Type) -> None:
    short = ("gen-config", "-n", "--gpus", "2", "--gpu", "3090", "--model", "qwen3-8b")
    done = dstrain(*short, "--seq-len", "1024")
    assert done.returncode == 4
    assert "assumed: 48.0 GiB of RAM on each node; change it with --host-memory" in done.stderr
    offered = re.search(r"These options fit:\n +--host-memory (\d+GiB): ", done.stderr)
    assert offered
    assert dstrain(*short, "--seq-len", "1024", "--host-memory", offered[1]).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ("--zero-stage", "0"),
        ("--optimizer", "adamw_8bit"),
        ("--optimizer", "adamw_bf16"),
        ("--loss", "chunked", "--host-memory", "64GiB", "--gpu-memory-limit", "20.5GiB"),
        ("--lora-rank", "8", "--method", "lora"),
        ("--qwz",),
        ("--liger",),
        ("--grad-ckpt", "--activation-offload"),
        ("--tiled-mlp", "--rope-scaling", "yarn", "--seq-len", "65536"),
    ],
)
def test_the_next_command_works_as_it_is_typed(dstrain: Type, words: tuple[str, ...]) -> None:
    done = dstrain("plan", "--model", "qwen3-0.6b", "--gpus", "1", "--gpu", "4090", "--top", "1", *words)
    assert done.returncode == 0, done.stderr
    _, _, following = done.stderr.partition("next: dstrain ")
    is_generated = not {"--lora-rank"}.intersection(words)
    assert bool(following) == is_generated
    if following:
        assert following.count("\n") == 1, "a command that is broken cannot be pasted"
        typed = dstrain(*shlex.split(following))
        assert typed.returncode == 0, typed.stderr


def test_what_another_optimizer_than_adamw_needs_and_loses_is_said(dstrain: Type) -> None:
    said = dstrain(*PLAN, "--optimizer", "adamw_8bit", "--top", "1").stdout
    assert re.search(r"^chosen .* bf16, 8-bit AdamW, 4096 tokens$", " ".join(said.split("\n         ")), re.MULTILINE)
    assert "adamw_8bit needs bitsandbytes" in said
    said = " ".join(dstrain(*PLAN, "--optimizer", "adamw_bf16", "--top", "1").stdout.split())
    assert said.count("1/512 of a weight is lost: at learning rate 1e-05, weights above 0.0051 stay as they are") == 1


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("--sp", "4", "--tp", "1"), "sp", 4),
        (("--tp", "4", "--sp", "1"), "tp", 4),
        (("--zero-stage", "0", "--method", "qlora"), "zero_stage", 0),
        (("--offload", "nvme", "--nvme", "/nvme"), "offload", "nvme"),
        (("--attn", "flash_attention_2"), "attn", "flash_attention_2"),
        (("--global-batch", "96", "--sp", "1", "--tp", "1"), "grad_accum", 6),
    ],
)
def test_what_is_given_is_kept(dstrain: Type, words: tuple[str, ...], field: str, value: object) -> None:
    more = () if field == "zero_stage" else ("--micro-batch", "1")
    assert document(dstrain, *PLAN, *more, *words, "--gpu", "h200")["plans"][0][field] == value


@pytest.mark.parametrize("words", ["--liger", "--loss full", "--optimizer adamw_8bit", "--attn eager"])
def test_every_option_counts(dstrain: Type, words: str) -> None:
    assert document(dstrain, *ONE, *words.split())["plans"][0] != document(dstrain, *ONE)["plans"][0]


@pytest.mark.parametrize("words", ["--lora-rank 64", "--lora-targets q_proj,v_proj"])
def test_the_adapter_counts(dstrain: Type, words: str) -> None:
    lora = (*ONE, "--method", "lora")
    found = document(dstrain, *lora, *words.split())["model"]["num_trainable_params"]
    assert found != document(dstrain, *lora)["model"]["num_trainable_params"]


def test_adapters_of_experts_count_and_say_what_they_cost(dstrain: Type) -> None:
    lora = "plan --model qwen3-30b-a3b --gpu h100-sxm --gpus 8 --method lora --zero-stage 3"
    experts = f"{lora} --lora-target-parameters experts"
    plain, adapted = (document(dstrain, words, "--micro-batch", "1") for words in (lora, experts))
    more = 16 * 128 * (2048 + 2 * 768 + 768 + 2048) * 48
    assert adapted["model"]["num_trainable_params"] - plain["model"]["num_trainable_params"] == more
    assert adapted["plans"][0]["speed"]["step_s"] > plain["plans"][0]["speed"]["step_s"]
    said = " ".join(dstrain(experts, "--micro-batch", "1").stdout.split())
    assert "to a copy of a layer's weights in every pass: 1.12 GiB, and as much for its gradient" in said
    dropped = dstrain(experts, "--lora-dropout", "0.1")
    assert (dropped.returncode, "no input can be dropped" in dropped.stderr) == (3, True)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--sp", "3"), 3, "--sp 3"),
        (("--tp", "2", "--sp", "2"), 3, "exclude each other"),
        (("--zero-stage", "2", "--offload", "params"), 3, "the options contradict each other"),
        (("--global-batch", "50", "--sp", "1", "--tp", "1"), 3, "Write --global-batch 48 or 64."),
        (("--optimizer", "adam"), 2, "did you mean"),
        (("--zero-stage", "4"), 2, "0<=x<=3"),
        (("--lora-rank", "0", "--method", "lora"), 3, "--lora-rank is 0"),
        (("--lora-targets", "qproj", "--method", "lora"), 3, "q_proj"),
        (("--lora-target-parameters", "experts", "--method", "lora"), 3, "has no stacked weights of experts"),
        (("--grad-accum", "0"), 3, "--grad-accum is 0"),
    ],
)
def test_bad_input_gets_one_message(dstrain: Type, words: tuple[str, ...], code: int, said: str) -> None:
    done = dstrain(*PLAN, *words)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [PLAN, NOTHING_FITS, ONE, (*PLAN, "--top", "12", "--method", "lora")])
def test_no_line_is_wider_than_80_columns_when_piped(dstrain: Type, words: tuple[str, ...]) -> None:
    assert max(map(len, dstrain(*words).stdout.splitlines())) <= 80


def test_piped_bars_are_letters_against_the_line_of_the_capacity(dstrain: Type) -> None:
    lines = dstrain(*PLAN, "--top", "1", "-v").stdout.splitlines()
    bar = lines[lines.index(next(line for line in lines if line.startswith(" 1 "))) + 1]
    assert re.fullmatch(r"   P+G+O+B*W*A+L*x+ +: +\| +[\d.]+", bar)
    assert "\x1b" not in "".join(lines)
    lines = dstrain(*ONE[:-5], "--micro-batch", "64", "--no-grad-ckpt", "-v").stdout.splitlines()
    bar = next(line for line in lines if "|" in line and "capacity" not in line)
    assert re.search(r"[A-Z]\|[A-Zx]", bar)


def test_a_large_load_has_a_bar_of_its_own(dstrain: Type) -> None:
    done = dstrain("plan --gpus 8 --gpu 4090 --model qwen2.5-72b --method qlora --zero-stage 3 --top 1 -v")
    assert re.search(r"^   l+:l*\|l+ +39\.6$", done.stdout, re.MULTILINE)
    assert "l at load 39.6" in done.stdout
    assert "needs 39.6 GiB per GPU while the model is loaded" in done.stderr


def test_the_table_has_what_the_json_has(dstrain: Type) -> None:
    found = document(dstrain, *PLAN)["plans"][0]
    (row,) = [line for line in dstrain(*PLAN).stdout.splitlines() if re.match(r"1  ZeRO", line)]
    assert f"{found['memory']['device_bytes_per_gpu'] / 2**30:.1f}" in row
    assert f"{found['speed']['tokens_per_s_per_gpu']:.0f}" in row


VARIED = ("zero_stage", "offload", "micro_batch", "grad_ckpt", "sp", "tp", "hpz", "offload_ratio", "pin_memory")
"""Choices that a search varies, except the sizes of buffers, which reasons and JSON have."""


@pytest.mark.parametrize("field", VARIED)
@pytest.mark.parametrize("text", [label, short_label])
def test_plans_that_differ_print_differently(text: Callable[[Configuration], str], field: str) -> None:
    other = {"offload": Offload.PARAMS, "offload_ratio": 0.5, "grad_ckpt": True, "pin_memory": False}.get(field, 2)
    plan = changed(DEFAULTS, zero_stage=3, offload=Offload.OPTIMIZER)
    assert text(changed(plan, **{field: other})) != text(plan)  # type: ignore[arg-type]


def test_the_space_considered_is_said(dstrain: Type) -> None:
    found = document(dstrain, *PLAN)["considered"]
    said = f"{found['estimated']:,} estimated in full, {found['excluded_by_bound']:,} ruled out"
    assert said in " ".join(dstrain(*PLAN, "-v").stdout.split())


def on_a_terminal(tmp_path: Path, **variables: str) -> str:
    """Returns the output of the command on a terminal of 80 columns."""
    reader, writer = os.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "80", **variables}
    command = [sys.executable, "-m", "dstrain.cli", *PLAN, "--top", "1", "-v"]
    child = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=writer, stderr=writer)
    os.close(writer)
    pieces = []
    while True:
        try:
            piece = os.read(reader, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(reader)
    assert child.wait(timeout=60) == 0
    return b"".join(pieces).decode()


def test_a_terminal_gets_colour_unless_no_color_is_set(tmp_path: Path) -> None:
    assert "\x1b[30;44mP" in on_a_terminal(tmp_path)
    printed = on_a_terminal(tmp_path, NO_COLOR="1")
    assert ("PPP" in printed, "\x1b[3" in printed) == (True, False)


@pytest.mark.engine
def test_a_model_of_an_unknown_family_is_traced_and_says_so(
    dstrain: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lay_traps(tmp_path)
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 500, "n_positions": 256}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    told = dstrain("plan", "--model", str(tmp_path), "--gpus", "2", "--gpu", "a100", "--seq-len", "128")
    assert 'layers of model_type "gpt2" are not written in dstrain' in " ".join(told.stdout.split())


def test_images_of_gemma_3_are_traced(dstrain: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    family = vision_families.ALL["gemma3"]
    ids = {key: index for index, key in enumerate(family.ids)}
    config = vision_families.config_of("gemma3", family, ids, {"vocab_size": 500})
    config.save_pretrained(tmp_path)
    asked = ("plan", "--model", str(tmp_path), "--gpus", "2", "--gpu", "a100", "--seq-len", "128")
    told = dstrain(*asked, "--image-patches", "32")
    assert 'the vision tower of model_type "gemma3" is not written in dstrain' in " ".join(told.stdout.split())
    refused = dstrain(*asked, "--image-patches", "24")
    assert refused.returncode == 3
    assert "images of gemma3 are not 24 patches\nThey are 16, 32, 48, 64, …" in refused.stderr


def test_patches_are_counted_from_the_images_of_the_data(dstrain: Type, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    known = aliases.resolve("qwen3-vl-8b")
    assert known is not None
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    (tmp_path / "config.json").write_text(json.dumps(dict(known[1].config)))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 16, "merge_size": 2, "size": size}))
    image.new("RGB", (640, 480)).save(tmp_path / "small.png")
    image.new("RGB", (1024, 1024)).save(tmp_path / "large.png")
    rows = [{"instruction": "<image>What?", "output": "A", "images": [f"{name}.png"]} for name in ("small", "large")]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = ("plan", "--model", str(tmp_path), "--gpus", "8", "--gpu", "h100", "--no-freeze-vision-tower")
    told = dstrain(*asked, "--data", str(data))
    assert told.returncode == 0, told.stderr
    note = "--image-patches 4096: the most that the images of a sample have, of 2 samples that were looked at (2,648 on"
    assert note in " ".join(told.stderr.split())
    refused = dstrain(*asked)
    assert "Write --image-patches N" in refused.stderr
