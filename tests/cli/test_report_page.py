"""`report --html`: the page of runs, its curves and bars, and its view in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dstrain.job.schema import HealthRule
from dstrain.monitor.comparison import Part, Quantity
from dstrain.monitor.expert_balance import EVENT, load_map
from dstrain.oom import Part as Held
from dstrain.records import to_data
from dstrain.report.page import CHINESE, LEGEND
from dstrain.report.report import UNKNOWN
from dstrain.rundir import GONE, Stage
from tests.cli.browser import assert_stands_alone, parsed, shown
from tests.cli.conftest import Server, Type
from tests.report.runs import collectives, gpu_run, judged, night, out_of_memory

Need = Callable[[object, str], None]
EVIL = "</script><img src=x onerror=alert(1)>"
PROBE = """<script>
const { clientWidth, scrollWidth } = document.documentElement;
document.title = [innerWidth, clientWidth, scrollWidth, getComputedStyle(document.body).color].join("/");
</script>"""
"""Writes into the title how wide the window, its view and the page are, and the color of its text."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Path:
    """The pages of a run on GPUs that a rule warned of, of one on CPUs, and of both; the run has a hostile name."""
    folder = tmp_path_factory.mktemp("report")
    slow = gpu_run(folder / EVIL.replace("/", "|"), slower=1.2, waits=0.1, more=collectives(late=0.3))
    marked = out_of_memory(judged(slow))
    told = {"rule": HealthRule.LOSS_SPIKE, "step": 20, "severity": "critical", "message": f"step 20: {EVIL}"}
    (marked / "health.jsonl").write_text(json.dumps(told) + "\n")
    night(folder / "night")
    for name, runs in (("gpu", [marked.name]), ("cpu", ["night"]), ("both", [marked.name, "night"])):
        done = server.run(("report", *runs, "--html", f"{name}.html"), folder, {})
        assert (done.returncode, f"wrote {name}.html" in done.stderr) == (0, True), done.stderr
        assert done.stdout
    return folder


def text_of(pages: Path, name: str) -> str:
    return (pages / f"{name}.html").read_text(encoding="utf-8")


def test_nothing_points_outside_and_names_are_text(pages: Path) -> None:
    page = parsed(text_of(pages, "both"))
    assert_stands_alone(page)
    assert any(EVIL in item for item in page.texts["li"])
    assert any("img src=x" in title for title in page.texts["h1"])


def test_an_out_of_memory_has_a_section_with_its_parts_and_changes(pages: Path) -> None:
    page = parsed(text_of(pages, "gpu"))
    assert any("Out of GPU memory" in title for title in page.texts["h2"])
    assert {"16.0 GiB", "17.0 GiB", "18.0 GiB"} <= set(page.texts["td"])
    items = page.texts["li"]
    assert any("36 × 96.0 MiB" in item and "after mlp.gate_proj" in item for item in items)
    assert any("55.0 GiB per GPU, a step takes 3 % longer" in item for item in items)
    assert not any("Out of GPU memory" in title for title in parsed(text_of(pages, "cpu")).texts["h2"])


def test_loads_of_experts_have_a_curve_and_a_map(dstrain: Type, need: Need, tmp_path: Path) -> None:
    metrics = night(tmp_path / "night") / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    loads = load_map(
        [[40 + (7 * layer + expert) % 5 for expert in range(127)] + [0] for layer in range(48)], range(48), 60
    )
    lines = [{**line, "expert_load_cv": 0.3 + 0.01 * number} for number, line in enumerate(lines)]
    lines.append({"event": EVENT, "time_s": lines[-1]["time_s"], **to_data(loads)})
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = dstrain("report", "night", "--html", "page.html")
    assert "48 of 6,144 experts got no token" in " ".join(done.stdout.split())
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = parsed(text)
    assert_stands_alone(page)
    captions = page.texts["figcaption"]
    assert [caption.count("Load of experts") for caption in captions][-2:] == [1, 1]
    paths = [values for tag, values in page.tags if tag == "path"]
    cells = re.findall(r"M(\d+) (\d+)h(\d+)v1", "".join(str(one["d"]) for one in paths[: -len(LEGEND)]))
    assert sum(int(count) for _, _, count in cells) == 48 * 128
    assert len({(row, at) for at, row, _ in cells}) == len(cells), "no cell has two colors"
    assert text[text.index("<details>") :].count("<tr><td>") >= 48
    target = tmp_path / "narrow.html"
    target.write_text(text + PROBE)
    inner, view, scrolled, _ = (
        parsed(shown(target, "", "--window-size=360,800", need=need).stdout).texts["title"][0].split("/")
    )
    assert (int(inner), scrolled) == (360, view), "the map is wider than the window"


def test_the_curves_have_the_points_of_the_run(pages: Path) -> None:
    lines = [values for tag, values in parsed(text_of(pages, "cpu")).tags if tag == "polyline"]
    points = {str(line["class"]): str(line["points"]).split() for line in reversed(lines)}
    assert (len(points["curve train"]), len(points["curve eval"])) == (60, 4)
    first, last = (
        tuple(map(float, point.split(","))) for point in (points["curve train"][0], points["curve train"][-1])
    )
    assert (first[0], last[0]) == (0, 100)
    assert first[1] < last[1], "the loss falls"
    marks = [
        str(values["class"]) for tag, values in parsed(text_of(pages, "cpu")).tags if "mark" in str(values.get("class"))
    ]
    assert marks == ["mark restart", "mark restart"]
    assert text_of(pages, "gpu").count('class="mark critical"') == 2
    assert text_of(pages, "gpu").count('class="curve planned"') == 1


def test_there_is_a_bar_for_the_plan_and_each_rank(pages: Path) -> None:
    page = parsed(text_of(pages, "gpu"))
    rows = [values for _, values in page.tags if values.get("class") == "row"]
    assert len(rows) == 2 + 1 + 8  # of a step, and of memory
    widths = [
        float(re.findall(r"[\d.]+", str(values["style"]))[0]) for tag, values in page.tags if "width:" in str(values)
    ]
    of_steps, of_memory = widths[:8], widths[8:]
    assert len(of_memory) == 4 * 9
    assert sum(of_memory[:4]) == pytest.approx(100, abs=0.1)
    assert sum(of_steps[:4]) == pytest.approx(100 / 1.2, abs=0.1), "a planned step, on the scale of the measured one"


def test_checks_the_first_steps_and_the_parts_of_a_step_are_there(pages: Path) -> None:
    texts = parsed(text_of(pages, "gpu")).texts
    assert any("✗ first loss" in item for item in texts["b"]), "a check that did not pass stands out"
    assert not any("worst batch" in item for item in texts["b"])
    assert any("to change: dataloader_num_workers: 2" in item for item in texts["p"])
    assert any("all_gather 27.9 GiB" in item for item in texts["p"])
    page = text_of(pages, "gpu")
    widths = re.findall(r'class="p4" style="width:([\d.]+)%"', page)
    assert [float(width) > 1 for width in widths] == [False, True], "a plan waits for no slower rank"


def test_all_that_a_report_names_is_there_in_chinese() -> None:
    names = {*Quantity, *Part, *Stage, *Held, GONE, UNKNOWN}
    assert {str(name) for name in names} <= {str(key) for key in CHINESE}


@pytest.mark.parametrize(("width", "is_dark"), [(360, False), (1920, True)])
def test_a_browser_shows_it_at_any_width_in_light_and_dark(pages: Path, width: int, is_dark: bool, need: Need) -> None:
    target = pages / f"{width}.html"
    target.write_text(text_of(pages, "both") + PROBE)
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    done = shown(target, "#lang=zh", f"--window-size={width},800", scheme, need=need)
    assert "CONSOLE" not in done.stderr
    page = parsed(done.stdout)
    inner, view, scrolled, color = page.texts["title"][0].split("/")
    assert (int(inner), scrolled) == (width, view), "a part of the page is wider than the window"
    assert color == ("rgb(255, 255, 255)" if is_dark else "rgb(0, 0, 0)")
    assert ("html", {"lang": "zh"}) in page.tags


def test_a_page_of_another_kind_is_not_replaced(dstrain: Type, pages: Path, tmp_path: Path) -> None:
    night(tmp_path / "output")
    (tmp_path / "plan.html").write_text("<!doctype html>\n<!-- dstrain plan -->\n")
    done = dstrain("report", "--html", "plan.html")
    assert (done.returncode, done.stdout) == (6, "")
    assert dstrain("report", "--html", "new.html").returncode == 0
    assert dstrain("report", "--html", "new.html").returncode == 0
