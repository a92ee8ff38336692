"""`--html`: the page of a plan, its figures, its names from outside, and its view in a browser."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import TINY_CONFIG

from dstrain.cli.output.plan import LIMITS, PARTS
from dstrain.facts.cluster.cluster import Origin
from dstrain.report.html import CHINESE, signature
from dstrain.units import GIB
from tests.cli.browser import Page, assert_stands_alone, parsed, shown
from tests.cli.conftest import ROOT, Server, Type

MODEL = "b</script><script>document.title='mine'</script><img src=x onerror=alert(1)>"
WORDS: tuple[str, ...] = (
    *("plan", "--gpus", "2", "--gpu", "4090", "--gpu-memory-limit", "1536MiB", "--host-memory", "64GiB"),
    *("--model", MODEL, "--offload", "none", "--zero-stage", "1", "--no-grad-ckpt"),
)
MOVE = "function move(id, at) { document.all[id].value = at; document.all[id].dispatchEvent(new Event('input')); }"
"""JavaScript that moves a slider as a user does."""


def data_of(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.texts["data"][0])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Path:
    """A folder with a model of a hostile name, and the page of its plan."""
    folder = tmp_path_factory.mktemp("page")
    (folder / MODEL).mkdir(parents=True)
    (folder / MODEL / "config.json").write_text(json.dumps(TINY_CONFIG))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = server.run((*WORDS, "--html", "plan.html"), folder, environment)
    assert done.returncode == 0, done.stderr
    assert "wrote plan.html" in done.stderr
    return folder


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    return (folder / "plan.html").read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_plan(dstrain: Type, folder: Path, html: str) -> None:
    page = parsed(html)
    answer = json.loads(dstrain(*WORDS, "--json", cwd=folder).stdout)
    assert data_of(page)["plan"] == answer
    memory = answer["plans"][0]["memory"]
    sizes = [sum(memory["breakdown_bytes"][name] for name in part.fields) for part in PARTS]
    assert [page.texts[f"gpu.parts.{index}"][0] for index in range(len(PARTS))] == [
        f"{size / GIB:.1f}" for size in sizes
    ]
    assert page.texts["gpu.total"][0] == f"{sum(sizes) / GIB:.1f}"
    assert page.texts["host.total"][0] == f"{memory['host_bytes_per_node'] / GIB:.0f}"
    assert page.texts["tokens"][0] == f"{answer['plans'][0]['speed']['tokens_per_s_per_gpu']:.0f}"
    assert set(answer["plans"][0]["reasons"]) <= set(page.texts["li"])
    table = page.texts["table"][0]
    assert all(plan["title"] in table for plan in answer["plans"])


def test_a_point_is_the_answer_to_the_command_that_it_names(dstrain: Type, folder: Path, html: str) -> None:
    data = data_of(parsed(html))
    for gpus, seq_len, micro_batch in ((1, 2048, None), (8, 4096, 2)):
        axes = data["axes"]
        index = axes["gpus"].index(gpus) * len(axes["seq_len"]) + axes["seq_len"].index(seq_len)
        point = data["points"][index * len(axes["micro_batch"]) + axes["micro_batch"].index(micro_batch)]
        wanted = {"--gpus": str(gpus), "--seq-len": str(seq_len), "--micro-batch": str(micro_batch or "")}
        words = [word for pair in wanted.items() if pair[1] for word in pair]
        chosen = json.loads(dstrain(*WORDS, *words, "--json", cwd=folder).stdout)["plans"][0]
        assert all(f"{key} {value}" in point["command"] for key, value in wanted.items() if value)
        assert point["title"] == chosen["title"]
        assert point["gpu"]["total"] == f"{chosen['memory']['device_bytes_per_gpu'] / GIB:.1f}"
        assert point["tokens"] == f"{chosen['speed']['tokens_per_s_per_gpu']:.0f}"


def test_nothing_points_outside(html: str) -> None:
    assert_stands_alone(parsed(html))


def test_names_are_text(html: str) -> None:
    page = parsed(html)
    tags = [tag for tag, _ in page.tags]
    assert (tags.count("script"), "img" in tags) == (2, False)
    assert data_of(page)["plan"]["model"]["name"] in page.texts["dd"][6]
    assert "img src=x onerror=alert(1)>" in page.texts["code"][0]


def test_all_that_the_planner_names_is_there_in_chinese() -> None:
    assert {part.name for part in PARTS} | set(LIMITS.values()) | {str(origin) for origin in Origin} <= set(CHINESE)


@pytest.mark.parts(6, at=1)
@pytest.mark.parametrize("is_fitting", [True, False])
def test_a_browser_shows_the_point_of_the_address_or_of_the_sliders(
    folder: Path, html: str, is_fitting: bool, need: Callable[[object, str], None]
) -> None:
    data = data_of(parsed(html))
    point = next(point for point in data["points"][1:] if point["fits_gpu"] is is_fitting)
    axes, index = data["axes"], data["points"].index(point)
    rest, micro_batch = divmod(index, len(axes["micro_batch"]))
    gpus, seq_len = divmod(rest, len(axes["seq_len"]))
    values = (axes["gpus"][gpus], axes["seq_len"][seq_len], axes["micro_batch"][micro_batch] or "chosen")
    target = folder / f"{is_fitting}.html"
    view = "gpus={}&seq_len={}&micro_batch={}&lang=zh".format(*values)
    places = {"gpus": gpus, "seq_len": seq_len, "micro_batch": micro_batch}
    moved = "".join(f"move('{axis}', {at});" for axis, at in places.items())
    target.write_text(html if is_fitting else html + f"<script>{MOVE}{moved}document.all.zh.click()</script>")
    done = shown(target, f"#{view}" if is_fitting else "", need=need)
    assert "CONSOLE" not in done.stderr
    page = parsed(done.stdout)
    near = {name: texts[-1] for name, texts in page.texts.items()}
    assert (near["gpus"], near["seq_len"]) == (f"{values[0]} ({point['shape']})", str(values[1]))
    assert (near["title"], near["step"], near["gpu.total"]) == (point["title"], point["step"], point["gpu"]["total"])
    assert near["gpu.parts.5"] == point["gpu"]["parts"][5]["gib"]
    assert near["limit_zh"] == CHINESE[point["limit"]]
    assert ("html", {"lang": "zh"}) in page.tags
    walls = [values for _, values in page.tags if values.get("data-if") == "gpu"]
    assert ("hidden" in walls[-1]) is is_fitting
    assert "mine" not in page.texts["title"]


def test_a_page_is_replaced_and_nothing_else_is(dstrain: Type, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "b<", tmp_path / "b<")
    (tmp_path / "old.html").write_text(signature("plan") + "of the last time")
    (tmp_path / "own.html").write_text("<p>mine")
    assert dstrain(*WORDS, "--html", "old.html").returncode == 0
    assert (tmp_path / "old.html").read_text() == (folder / "plan.html").read_text()
    for name, code in (("own.html", 6), ("missing/plan.html", 5), ("/dev/null", 5), ("b<", 2)):
        done = dstrain(*WORDS, "--html", name)
        assert (done.returncode, done.stdout) == (code, ""), name
        assert f"{name}" in done.stderr
    assert (tmp_path / "own.html").read_text() == "<p>mine"
    assert not (tmp_path / "missing").exists()


def test_gen_config_writes_it_beside_its_files_and_does_not_repeat_it(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(TINY_CONFIG))
    words = ("gen-config", "--gpus", "1", "--gpu", "4090", "--model", "model", "--zero-stage", "2", "--no-grad-ckpt")
    assert dstrain(*words, "--dry-run", "--html", "plan.html").returncode == 2
    assert dstrain(*words, "--html", "plan.html").returncode == 0
    command = data_of(parsed((tmp_path / "plan.html").read_text()))["command"]
    assert command == f"dstrain {' '.join(words)}"
    (tmp_path / "plan.html").unlink()
    assert dstrain("gen-config").returncode == 0
    assert not (tmp_path / "plan.html").exists()


@pytest.mark.parametrize("verb", ["plan", "gen-config"])
def test_the_page_of_what_does_not_fit_names_the_options_that_the_terminal_names(
    dstrain: Type, tmp_path: Path, verb: str, need: Callable[[object, str], None]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(TINY_CONFIG))
    words: tuple[str, ...] = ("--gpus", "1", "--gpu", "4090", "--gpu-memory-limit", "1200MiB", "--host-memory", "64GiB")
    words += ("--model", "model", "--micro-batch", "32", "--seq-len", "2048", "--offload", "none")
    done = dstrain(verb, *words, "--html", "plan.html")
    assert (done.returncode, "wrote plan.html" in done.stderr) == (4, True), done.stderr
    said = [line.strip() for line in done.stderr.partition("These options fit:\n")[2].splitlines()]
    assert said
    view = shown(tmp_path / "plan.html", need=need)
    assert "CONSOLE" not in view.stderr
    page = parsed(view.stdout)
    listed = [text for text in page.texts["li"] if text.startswith("--")]
    commands = [text for text in page.texts["code"] if text.startswith(f"dstrain {verb} ")]
    assert [text.partition("dstrain")[0] for text in listed] == said
    assert all(any(text.endswith(command) for command in commands) for text in listed)
    ways = data_of(page)["ways"]
    assert dstrain(*shlex.split(ways[0]["command"])[1:], "--html", "plan.html").returncode == 0
    assert data_of(parsed((tmp_path / "plan.html").read_text()))["ways"] == []
