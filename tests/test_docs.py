"""The generated parts of the pages are what the code says, links lead somewhere, and both READMEs keep step."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path

import click
import pytest

from benchmarks import predict
from benchmarks.advisories import report as advisories
from benchmarks.published import half_report, ranges
from benchmarks.published.answers import Answer
from benchmarks.questions import asked
from docs import model_matrix, pictures
from dstrain.cli.main import cli
from dstrain.config.explain import job_keys
from dstrain.config.imports import accelerate, read, trainer
from dstrain.config.imports.source import Fate, Row
from dstrain.config.imports.tables import TRAINING_ARGUMENTS
from dstrain.facts.model import families
from dstrain.job.limits import CPU_LIMITS
from dstrain.monitor.health.rules import RULES as HEALTH_RULES
from dstrain.monitor.metrics import CURVES
from dstrain.monitor.traffic import KINDS
from dstrain.plan.search.decide import choice
from dstrain.units import GIB

pytestmark = pytest.mark.commands

ROOT = Path(__file__).parent.parent
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TRANSLATED = [(README, CHINESE), *((ROOT / "docs" / page.name, page) for page in (ROOT / "docs" / "zh").glob("*.md"))]
"""English pages and their Chinese ones."""


def docstring(path: Path) -> str:
    """Returns the first sentence of a module's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", doc.replace("\n", " "), maxsplit=1)[0]


def module_map() -> str:
    """Returns a line for every package, for the module that bears its name, and for every leaf beside the packages."""
    lines = ["| package or module | what it does |", "|---|---|"]
    for path in sorted((ROOT / "dstrain").rglob("*.py")):
        if path.name == "__init__.py":
            lines.append(f"| `{path.parent.relative_to(ROOT)}/` | {docstring(path)} |")
        elif path.stem == path.parent.name or path.parent.name == "dstrain":
            lines.append(f"| `{path.relative_to(ROOT)}` | {docstring(path)} |")
    return "\n".join(lines)


def commands() -> list[tuple[str, click.Command]]:
    """Returns every command with its full name."""
    found: list[tuple[str, click.Command]] = []

    def walk(name: str, command: click.Command) -> None:
        found.append((name, command))
        if isinstance(command, click.Group):
            context = click.Context(command)
            for child in command.list_commands(context):
                inner = command.get_command(context, child)
                assert inner is not None
                walk(f"{name} {child}", inner)

    walk("dstrain", cli)
    return found


def cli_reference() -> str:
    """Returns for every command the first sentence of its help, its arguments, and the names of its options."""
    parts = []
    for name, command in commands():
        context = click.Context(command, info_name=name, **cli.context_settings)  # type: ignore[arg-type]
        usage = " ".join(command.collect_usage_pieces(context))
        options = [max(option.opts, key=len) for option in command.params if isinstance(option, click.Option)]
        listed = ", ".join(f"`{option}`" for option in options)
        first = (command.help or "").partition("\n\n")[0].replace("\n", " ")
        parts.append(f"## `{name}`\n\n{first}\n\n`{usage}`" + (f": {listed}" if listed else ""))
    return "\n\n".join(parts)


def job_reference() -> str:
    """Returns a row for every key of a job file: name, default and meaning; the keys of sections come last."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key in sorted(job_keys().values(), key=lambda key: "." in key.path):
        is_section = "default" not in key.schema and (key.inside or key.path == "env")
        if is_section or key.path.startswith("eval_data[]"):
            continue  # its keys have rows of their own, which those of eval_data repeat
        default = "`{}`" if key.schema.get("type") == "object" else "required"
        if "default" in key.schema:
            default = f"`{str(key.default_text).replace(chr(34), '')}`"
        rows.append(f"| `{key.path}` | {default} | {key.meaning} |")
    return "\n".join(rows)


def _run(*words: str, cwd: Path = ROOT, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a command on a machine without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80", "PYTHONPATH": str(ROOT), "HOME": "/"}
    environment["TZ"] = "UTC"
    line = [sys.executable, *words]
    return subprocess.run(line, capture_output=True, text=True, env=environment, check=check, cwd=cwd)


@cache
def gen_config_output() -> str:
    """Returns what the first command prints on a machine without a GPU."""
    done = _run("-m", "dstrain.cli", "gen-config", "--gpus", "16", "--model", "qwen3-32b", "--dry-run")
    return f"```\n{done.stderr.rstrip()}\n```"


@cache
def plan_output() -> str:
    """Returns what `dstrain plan` prints, with the command that it names next."""
    done = _run("-m", "dstrain.cli", *pictures.PLAN_WORDS)
    return f"```\n{done.stdout}{done.stderr.rstrip()}\n```"


@cache
def report_output() -> str:
    """Returns what `dstrain report` says of the recorded run."""
    done = _run("-m", "dstrain.cli", "report", "night", cwd=ROOT / "tests" / "report")
    return f"```\n$ dstrain report night\n{done.stdout.rstrip()}\n```"


@cache
def edits_output() -> str:
    """Returns what lint, diff, explain and gen-config say of edited files."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)

        def typed(*words: str, fails: bool = False) -> str:
            done = _run("-m", "dstrain.cli", *words, cwd=place, check=not fails)
            return f"$ dstrain {' '.join(words)}\n{done.stdout.rstrip()}"

        typed("gen-config", "--gpus", "16", "--model", "qwen3-32b", "--hosts", "gpu[01-02]")
        _replace(place / "ds_config.json", '"overlap_comm": true', '"overlap_com": false')
        _replace(place / "job.yaml", "seed: 42", "seed: 7")
        found = [typed("lint", fails=True)]
        typed("lint", "--fix")
        found += [
            typed("explain", "--edits"),
            typed("explain", "overlap_comm"),
            typed("gen-config", "--seq-len", "8192", "--diff"),
        ]
    return "```\n" + "\n\n".join(found) + "\n```"


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def published_figures(answers: tuple[Answer, ...]) -> str:
    """Returns the figures on which no constant was set, each with whose runs it is of."""
    return half_report.figures(answers, predict.halves_of(answers), predict.later_answers())


def range_table(answers: tuple[Answer, ...]) -> str:
    """Returns the range that is printed with a step time, by kind of question."""
    return ranges.markdown(ranges.error_ranges(answers, predict.halves_of(answers)))


def cpu_table() -> str:
    """Returns what a CPU does not run."""
    rows = [
        f"| `{limit.key}` | `{limit.value}` | {limit.why} | {limit.unless or 'never'} | `{limit.instead}` |"
        for limit in CPU_LIMITS
    ]
    return "\n".join(["| setting | value | why not | runs if | write |", "|---|---|---|---|---|", *rows])


def health_table() -> str:
    """Returns the health rules with their limits."""
    rows = ["| rule | signal | warning | critical | source of the limits |", "|---|---|---:|---:|---|"]
    for name, rule in HEALTH_RULES.items():
        signal = " ".join((rule.signal.__doc__ or "").split("\n\n")[0].removeprefix("Returns ").rstrip(".").split())
        critical = "" if rule.critical is None else f"{rule.critical:g}"
        rows.append(f"| `{name}` | {signal} | {rule.warn:g} | {critical} | {rule.source} |")
    return "\n".join(rows)


def curve_table(*, is_chinese: bool = False) -> str:
    """Returns the names of curves in trackers; those of kinds of collectives share rows."""
    titles = ("曲线", "单位", "含义") if is_chinese else ("curve", "unit", "meaning")
    rows = [f"| `metrics.jsonl` | {' | '.join(titles)} |"]
    for name, curve in CURVES.items():
        if not name.startswith("comm/") or name.startswith(f"comm/{KINDS[0]}"):
            cells = (f"`{name}`", f"`{curve.tag}`", curve.unit, curve.chinese if is_chinese else curve.label)
            rows.append(f"| {' | '.join(cells).replace(KINDS[0], 'KIND')} |")
    kinds = ", ".join(f"`{kind}`" for kind in KINDS)
    kinds = f"`KIND` 是 {kinds} 之一。" if is_chinese else f"`KIND` is one of {kinds}."
    return "\n".join([rows[0], "|---|---|---|---|", *rows[1:], "", kinds])


def import_tables() -> str:
    """Returns the keys of each tool that mean something to a job; keys of Transformers are listed once."""
    passed_on = TRAINING_ARGUMENTS
    parts = [("Transformers' TrainingArguments", dict(passed_on))]
    for tool in read.TOOLS.values():
        own = {key: row for key, row in tool.rows.items() if passed_on.get(key) is not row}
        shared = accelerate.ROWS if tool is trainer.TOOL else {}
        parts.append((tool.title, {key: row for key, row in own.items() if shared.get(key) is not row}))
    for script in trainer.SCRIPTS:
        own = {key: row for key, row in script.tool.rows.items() if trainer.TOOL.rows.get(key) is not row}
        parts.append((script.tool.title, own))
    return "\n\n".join(f"## {title}\n\n{_import_table(rows)}" for title, rows in parts)


def _import_table(rows: Mapping[str, Row]) -> str:
    """Returns the keys that are written, by their target, and those that stop the import or are lost, by the reason."""
    written: dict[str, list[str]] = {}
    for row in rows.values():
        if row.fate is Fate.WRITTEN and row.target:
            written.setdefault(row.target, []).append(f"`{row.key}`")
    lines = ["| keys | become |", "|---|---|"]
    lines += [f"| {', '.join(keys)} | `{target}` |" for target, keys in written.items()]
    for fate in (Fate.MISSING, Fate.OTHER_TRAINING):
        if keys := [f"`{row.key}`" for row in rows.values() if row.fate is fate]:
            lines.append(f"| {', '.join(keys)} | {fate.value} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "module map": module_map,
    "job": job_reference,
    "health": health_table,
    "curves": curve_table,
    "command line": cli_reference,
    "gen-config": gen_config_output,
    "plan": plan_output,
    "edits": edits_output,
    "report": report_output,
    "imports": import_tables,
    "cpu": cpu_table,
    "advisories": advisories.faults,
}
"""The generated parts of the pages below docs/, by the name in their comment."""
IN_CHINESE: dict[str, Callable[[], str]] = {"curves": lambda: curve_table(is_chinese=True)}
"""The generated parts that are Chinese below docs/zh/."""
PUBLISHED: dict[str, Callable[[tuple[Answer, ...]], str]] = {
    "published figures": published_figures,
    "whose runs": published_figures,
    "ranges": range_table,
}
"""The generated parts that need the answers to all published runs."""
ELSEWHERE = {"keys", "rules"}
"""The generated parts that tests/config tests."""


def pages_with(names: Collection[str]) -> list[tuple[Path, str]]:
    """Returns the pages that have one of the generated parts, with its name."""
    parts = [(page, re.findall(r"<!-- generated: (.+) -->", page.read_text(encoding="utf-8"))) for page in PAGES]
    return [(page, name) for page, present in parts for name in present if name in names]


def compare(page: Path, name: str, wanted: str, *, update: bool) -> None:
    """Compares a generated part of a page, or replaces it."""
    text = page.read_text(encoding="utf-8")
    start, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->"
    before, rest = text.split(start)
    present, after = rest.split(end)
    wanted += "\n"
    if update:
        page.write_text(before + start + wanted + end + after, encoding="utf-8")
    else:
        assert present == wanted, "run pytest --update"


@pytest.mark.parametrize(("page", "name"), pages_with(PARTS), ids=str)
def test_a_generated_part_is_what_the_code_says(page: Path, name: str, request: pytest.FixtureRequest) -> None:
    parts = PARTS | (IN_CHINESE if page.parent.name == "zh" else {})
    compare(page, name, parts[name](), update=request.config.getoption("--update"))


@pytest.mark.parametrize(("page", "name"), pages_with(PUBLISHED), ids=str)
def test_figures_of_published_runs_are_what_the_planner_reaches(
    page: Path, name: str, answers: tuple[Answer, ...], request: pytest.FixtureRequest
) -> None:
    compare(page, name, PUBLISHED[name](answers), update=request.config.getoption("--update"))


def test_every_generated_part_is_generated_in_each_language_of_its_page() -> None:
    marked = {page: set(re.findall(r"<!-- generated: (.+) -->", page.read_text(encoding="utf-8"))) for page in PAGES}
    assert set().union(*marked.values()) == PARTS.keys() | PUBLISHED.keys() | ELSEWHERE
    assert all(marked[english] == marked[chinese] for english, chinese in TRANSLATED)


@pytest.mark.parametrize("name", ["plan", "packages"])
def test_a_picture_is_what_its_command_draws(name: str, request: pytest.FixtureRequest) -> None:
    words = (pictures.PLAN_WORDS[0], "-v", *pictures.PLAN_WORDS[1:])
    drawn = pictures.packages()
    if name == "plan":
        drawn = pictures.terminal(words, _run("-m", "dstrain.cli", *words).stdout.rstrip())
    path = pictures.IMAGES / f"{name}.svg"
    if request.config.getoption("--update"):
        path.write_text(drawn, encoding="utf-8")
    else:
        assert path.read_text(encoding="utf-8") == drawn, "run pytest --update"


def without_code(text: str) -> str:
    """Returns a Markdown text without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Returns the anchors that a forge gives the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def links(page: Path) -> list[tuple[Path, str]]:
    """Returns the files that a page links to, with the anchor."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
    local = [target.partition("#") for target in targets if not target.startswith(("http://", "https://"))]
    return [((page.parent / name).resolve() if name else page, anchor) for name, _, anchor in local]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), (target, anchor)


@pytest.mark.parametrize("index", ["docs/index.md", "docs/zh/index.md"])
def test_the_index_links_to_every_page_of_its_language(index: str) -> None:
    page = ROOT / index
    is_chinese = page.parent.name == "zh"
    pages = {path for path in (ROOT / "docs").rglob("*.md") if ("zh" in path.parts) == is_chinese}
    linked = {target for target, _ in links(page)}
    assert pages - linked == {page}


def test_every_known_model_has_a_row_of_the_matrix() -> None:
    names = re.findall(r"^\| ([\w.-]+) \|", model_matrix.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert names == ["model", *families.known()]
    assert model_matrix.PAGE.read_text(encoding="utf-8").endswith(f"\n{model_matrix.foot()}\n")


@pytest.mark.sweep
@pytest.mark.parts(48)
@pytest.mark.parametrize("cluster", model_matrix.CLUSTERS)
@pytest.mark.parametrize("name", families.known())
def test_a_cell_of_the_matrix_is_the_plan(name: str, cluster: str) -> None:
    lines = model_matrix.PAGE.read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith(f"| {name} |"))
    present = row.split(" | ")[1 + model_matrix.CLUSTERS.index(cluster)].removesuffix(" |")
    assert model_matrix.cell(name, cluster) == present, "run python -m docs.model_matrix"


def test_chinese_pages_link_to_chinese_ones() -> None:
    translated = {english for english, _ in TRANSLATED}
    for english, page in TRANSLATED:
        assert {target for target, _ in links(page) if target in translated} <= {english}, page


def test_every_page_for_users_is_in_chinese_or_the_chinese_index_links_to_the_english_one() -> None:
    for_developers = {"architecture.md", "style.md"}
    english = {page for page in (ROOT / "docs").glob("*.md") if page.name not in for_developers | {"index.md"}}
    linked = {target for target, _ in links(ROOT / "docs" / "zh" / "index.md")}
    assert english - {page for page, _ in TRANSLATED} == english & linked


@pytest.mark.parametrize("page", [chinese for _, chinese in TRANSLATED], ids=lambda page: page.name)
def test_a_chinese_page_is_written_in_chinese(page: Path) -> None:
    """Tables that the code writes are English."""
    generated = r"<!-- generated: .+? -->.*?<!-- end: .+? -->"
    text = without_code(re.sub(generated, "", page.read_text(encoding="utf-8"), flags=re.DOTALL))
    chinese = r"[\u4e00-\u9fff]"
    prose = [line for line in text.splitlines() if re.search(f"[a-zA-Z]{{3}}|{chinese}", line)]
    assert sum(bool(re.search(chinese, line)) for line in prose) >= 0.8 * len(prose)


def typed_commands(text: str) -> list[list[str]]:
    """Returns the words of every dstrain command in a page, in blocks and in sentences."""
    blocks = "\n".join(re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL))
    lines = [line.partition(" #")[0].strip() for line in blocks.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return [line.split()[1:] for line in lines if line.startswith("dstrain ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_in_a_page_exists_with_its_options(page: Path) -> None:
    present = dict(commands())
    for words in typed_commands(page.read_text(encoding="utf-8")):
        name = "dstrain"
        for word in words:
            if f"{name} {word.partition('|')[0]}" not in present:
                break
            name = f"{name} {word.partition('|')[0]}"
        options = {
            option for parameter in present[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        first = words[0]
        assert name != "dstrain" or first.startswith("-") or not first.isalpha() or first.isupper(), words
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= options | {"--help", "-h"}, words


_EIGHT_K = "qwen3-8b --gpus 1 --gpu h100 --method lora --seq-len 8192"
OPTIONS_OF_FIGURES: tuple[tuple[str, str, str], ...] = (
    ("qwen3-8b --gpus 1 --gpu 4090 --method lora --seq-len 16384", "tokens", "1,443"),
    ("qwen3-8b --gpus 1 --gpu 4090 --method lora --seq-len 16384 --no-activation-offload", "tokens", "1,170"),
    ("qwen3-8b --gpus 8 --gpu 4090", "tokens", "1,399"),
    ("qwen3-8b --gpus 8 --gpu 4090 --no-activation-offload", "tokens", "1,302"),
    ("qwen3-8b --gpus 2 --gpu 4090 --method lora --packing", "tokens", "1,944"),
    ("llama-3.1-8b --gpus 1 --gpu h100 --method lora --seq-len 131072", "GiB", "56.5"),
    ("llama-3.1-8b --gpus 1 --gpu h100 --method lora --seq-len 131072 --no-activation-offload", "GiB", "69.8"),
    ("qwen3-32b --gpus 8 --gpu h100", "tokens", "1,438"),
    ("qwen3-32b --gpus 8 --gpu h100 --loss full", "tokens", "1,212"),
    ("qwen3-32b --gpus 8 --gpu h100 --offload optimizer", "tokens", "1,218"),
    ("qwen3-32b --gpus 8 --gpu h100 --offload none --optimizer adamw_8bit", "tokens", "1,490"),
    ("llama-3.1-70b --gpus 16 --gpu h100", "tokens", "534"),
    ("llama-3.1-70b --gpus 16 --gpu h100 --optimizer adamw_8bit", "tokens", "786"),
    ("qwen3-8b --gpus 8 --gpu a100 --zero-stage 3", "GiB", "58.9"),
    ("qwen3-8b --gpus 8 --gpu a100 --zero-stage 3 --optimizer adamw_bf16", "GiB", "53.2"),
    *(
        (f"{_EIGHT_K} --zero-stage 0 --grad-ckpt --micro-batch 1 --loss {loss}", "GiB", figure)
        for loss, figure in (("full", "36.6"), ("chunked", "25.0"), ("fused", "22.0"))
    ),
)
"""Options of `dstrain plan`, and a figure of the answer that stands in a sentence of the page about plans."""


@pytest.mark.parametrize(("options", "unit", "figure"), OPTIONS_OF_FIGURES)
def test_a_figure_in_a_sentence_is_what_the_planner_says(options: str, unit: str, figure: str) -> None:
    inputs = asked(["--model", *options.split()])
    found = choice(inputs.workload, inputs.request)
    assert found.speed is not None
    values = {
        "tokens": f"{found.speed.tokens_per_s_per_gpu:,.0f}",
        "GiB": f"{found.memory.device_bytes_per_gpu / GIB:.1f}",
    }
    assert values[unit] == figure
    for page in ("docs/plan.md", "docs/zh/plan.md"):
        assert re.search(rf"(?<![\d.,]){figure}(?![\d.,]\d)", (ROOT / page).read_text(encoding="utf-8")), page


def test_the_first_page_is_short() -> None:
    assert all(len(page.read_text(encoding="utf-8").splitlines()) <= 200 for page in (README, CHINESE))


def code_blocks(text: str) -> list[str]:
    """Returns the shell blocks of a text, without comments."""
    blocks = re.findall(r"```(?:sh|yaml|json)\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"\s*#.*", "", block) for block in blocks]


@pytest.mark.parametrize("pages", TRANSLATED, ids=lambda pages: pages[1].name)
def test_a_chinese_page_has_the_same_commands_and_parts(pages: tuple[Path, Path]) -> None:
    english, chinese = (page.read_text(encoding="utf-8") for page in pages)
    assert code_blocks(english) == code_blocks(chinese)
    parts, translated = (len(re.findall(r"^## ", text, re.MULTILINE)) for text in (english, chinese))
    assert parts == translated or pages[0].name == "index.md"  # developers' pages are in English


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_every_command_has_an_example_and_every_option_help(name: str, command: click.Command) -> None:
    assert "Example:" in (command.help or "")
    assert [each.name for each in command.params if isinstance(each, click.Option) and not each.help] == []


def test_every_module_says_what_it_is() -> None:
    assert [path for path in (ROOT / "dstrain").rglob("*.py") if not docstring(path)] == []
