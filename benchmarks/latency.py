"""Seconds from the start of the process to the answer, for the verbs that people wait for; and where imports take them.

Example: python benchmarks/latency.py --repeat 20 --json latency.json

Commands take turns, so that what else the machine does slows all alike; one turn before them fills the page cache and
compiles, as pip does when it installs. The import times are of one run under `python -X importtime`, which makes each
import slower than it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BARE = ("-c", "pass")
"""The bare interpreter, with the modules that its environment imports."""
HELP = ("--help",)
HELP_BAR = 8
"""Limit of the processor time of the help, as a multiple of a bare interpreter."""
BAR_S = 0.5
"""Limit of the seconds of a plan."""
PLAN = ("plan", "--model", "qwen3-32b", "--gpus", "16")
GEN_CONFIG = ("gen-config", "--gpus", "16", "--model", "qwen3-32b", "-n")
LINT_BAR_S = 0.3
"""Limit of the seconds of lint for a file of 200 keys."""
LINTED_KEYS = 200
USAGE_ERROR = 2
"""Click's exit code for a verb that does not exist."""
ANSWERED = (0, 4)
"""Exit codes of a plan that fits, and of one that does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One line of the table."""

    command: str
    """The command line."""
    median_s: float | None
    """Median seconds, or None if this dstrain does not know the command."""
    min_s: float | None
    """Minimum seconds."""
    min_cpu_s: float | None
    """Minimum processor seconds, which depend less on other load of the machine."""
    exit_code: int
    """Exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportTime:
    """Import time of one package."""

    name: str
    """A third-party package with all that it imports first, a standard module that dstrain imports, or `dstrain`."""
    seconds: float
    """Seconds, under the profiler."""


def environment(cache: Path) -> dict[str, str]:
    """Returns the environment of a machine without GPUs, so that all machines answer the same question.

    Compiled modules are kept in `cache`, whatever the shell's settings.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80", "PYTHONPYCACHEPREFIX": str(cache)}


def program(words: tuple[str, ...]) -> list[str]:
    """Returns the installed `dstrain` script, or the module if it is not installed; the interpreter for `BARE`."""
    script = Path(sys.executable).with_name("dstrain")
    if words == BARE:
        return [sys.executable]
    return [str(script)] if script.exists() else [sys.executable, "-m", "dstrain.cli"]


def run(words: tuple[str, ...], cache: Path) -> tuple[float, float, subprocess.CompletedProcess[str]]:
    """Returns the seconds, the processor seconds and the finished process of one command."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*program(words), *words], capture_output=True, text=True, env=environment(cache), check=False
    )
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def long_config(folder: Path) -> Path:
    """Writes a configuration of 200 keys of DeepSpeed with their defaults, and returns its path."""
    from dstrain.config.keys import KEYS

    config: dict[str, Any] = {}
    wanted = [(path, row) for path, row in KEYS.items() if row.default is not None and "*" not in path]
    for path, row in wanted[:LINTED_KEYS]:
        node = config
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = row.default
    file = folder / f"{LINTED_KEYS}-keys.json"
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return file


def measure(repeat: int, cache: Path) -> list[Latency]:
    """Returns a line for every command."""
    commands: tuple[tuple[str, ...], ...] = (BARE, HELP, ("lint", str(long_config(cache))), GEN_CONFIG, PLAN)
    taken: dict[tuple[str, ...], list[tuple[float, float]]] = {words: [] for words in commands}
    codes = {words: run(words, cache)[2].returncode for words in commands}
    for _ in range(repeat):
        for words in commands:
            if codes[words] != USAGE_ERROR:
                taken[words].append(run(words, cache)[:2])
    return [
        Latency(
            command=command_text(words),
            median_s=statistics.median(wall for wall, _ in turns) if turns else None,
            min_s=min(wall for wall, _ in turns) if turns else None,
            min_cpu_s=min(cpu for _, cpu in turns) if turns else None,
            exit_code=codes[words],
        )
        for words, turns in taken.items()
    ]


def command_text(words: tuple[str, ...]) -> str:
    """Returns the command line, with files without their folders."""
    typed = [Path(word).name if "/" in word else word for word in words]
    return " ".join(["python" if words == BARE else "dstrain", *typed])


def import_times(words: tuple[str, ...], cache: Path) -> list[ImportTime]:
    """Returns the import times of one command, the longest first."""
    profiled = [sys.executable, "-X", "importtime", "-m", "dstrain.cli", *words]
    done = subprocess.run(profiled, capture_output=True, text=True, env=environment(cache), check=False)
    return by_package(done.stderr)


def by_package(profile: str) -> list[ImportTime]:
    """Returns the seconds by package of the text that `-X importtime` prints.

    A line is `import time: self [us] | cumulative | name`; a module stands below what it imports, which is indented by
    two more. So the lines are read from the last to the first, with the importers of each at hand.
    """
    totals: defaultdict[str, float] = defaultdict(float)
    importers: list[str] = []
    for line in reversed(profile.splitlines()):
        fields = line.removeprefix("import time:").split("|")
        if not line.startswith("import time:") or not fields[0].strip().isdigit():
            continue
        depth = (len(fields[2]) - len(fields[2].lstrip()) - 1) // 2
        importers[depth:] = [fields[2].strip()]
        totals[package(importers)] += int(fields[0]) / 1e6
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    return [ImportTime(name=name, seconds=seconds) for name, seconds in ordered]


def package(importers: list[str]) -> str:
    """Returns the package that a module counts for, given its importers from the outermost to itself.

    >>> package(["dstrain.cli.main", "click", "inspect"]), package(["dstrain.paths", "http.client", "email"])
    ('click', 'http')
    """
    roots = [name.partition(".")[0] for name in importers]
    for root in reversed(roots):
        if root not in sys.stdlib_module_names and root not in ("dstrain", "__main__"):
            return root
    if roots[-1] == "dstrain":
        return "dstrain"
    own = [index for index, root in enumerate(roots) if root == "dstrain"]
    return roots[own[-1] + 1] if own else "python"


def considered(cache: Path) -> dict[str, Any] | None:
    """Returns how many configurations a plan considers, or None if this dstrain cannot plan."""
    *_, done = run((*PLAN, "--json"), cache)
    if done.returncode not in ANSWERED:
        return None
    counts: dict[str, Any] = json.loads(done.stdout)["considered"]
    return counts


def tell(lines: list[Latency], imports: list[ImportTime], looked_at: dict[str, Any] | None) -> None:
    """Prints the tables."""
    width = max(len(line.command) for line in lines)
    print(f"{'':{width}}{'median s':>10}{'min s':>8}{'min cpu s':>11}")
    for line in lines:
        if line.median_s is None or line.min_s is None or line.min_cpu_s is None:
            print(f"{line.command:{width}}  this dstrain does not know the command (exit {line.exit_code})")
        else:
            note = f"  exit {line.exit_code}" if line.exit_code else ""
            print(f"{line.command:{width}}{line.median_s:10.3f}{line.min_s:8.3f}{line.min_cpu_s:11.3f}{note}")
    bare, help_, lint, plan = lines[0], lines[1], lines[2], lines[-1]
    if bare.min_cpu_s and help_.min_cpu_s:
        times = help_.min_cpu_s / bare.min_cpu_s
        verdict = "within" if times <= HELP_BAR else "OVER"
        print(f"help takes {times:.1f} times the processor time of a bare interpreter, {verdict} the bar of {HELP_BAR}")
    if lint.median_s is not None:
        print(f"lint is {'within' if lint.median_s <= LINT_BAR_S else 'OVER'} the bar of {LINT_BAR_S} s")
    if plan.median_s is not None and looked_at is not None:
        verdict = "within" if plan.median_s <= BAR_S else "OVER"
        print(
            f"a plan is {verdict} the bar of {BAR_S} s, with {looked_at['estimated']} configurations estimated", end=""
        )
        print(f" and {looked_at['excluded_by_bound']} excluded by a bound")
    print(f"\n{'imports':{width}}{'s':>10}")
    for imported in imports:
        print(f"{imported.name:{width}}{imported.seconds:10.3f}")


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=10, help="runs of every command (default: 10)")
    parser.add_argument("--top", type=int, default=10, help="packages to list (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements to FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(options.repeat, Path(folder))
        looked_at = considered(Path(folder))
        imports = import_times(PLAN if looked_at is not None else GEN_CONFIG, Path(folder))[: options.top]
    tell(lines, imports, looked_at)
    if options.json:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
        report = {
            **machine, "repeat": options.repeat, "considered": looked_at,
            "measured": [asdict(line) for line in lines], "imports": [asdict(imported) for imported in imports],
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
