"""Shows faults of DeepSpeed releases on CPU ranks: each case under a release with the fault, and under one without.

Example: python benchmarks/advisories/run.py advisories
         python benchmarks/advisories/run.py advisories --only offloaded_accumulation --json results.json

Every DeepSpeed is installed below the folder that is named, beside a venv with torch's CPU wheel (1 GB); nothing else
is touched. An answer that is not the same under both releases is printed in bold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file

from benchmarks.advisories.environments import Environments

CASES = Path(__file__).resolve().parent / "cases"
LIMIT_S = 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One script, and the releases under which it runs."""

    name: str
    """The script's name, without `.py`."""
    pulls: tuple[int, ...]
    """The pull requests of DeepSpeed that made the difference."""
    versions: tuple[str, str]
    """The last release before the difference, and the first after it; or nearby ones."""
    ranks: int = 1


CASES_IN_ORDER = (
    Case(name="offloaded_accumulation", pulls=(7967,), versions=("0.18.9", "0.19.0")),
    Case(name="several_backwards", pulls=(7981,), versions=("0.18.9", "0.19.0")),
    Case(name="bf16_without_zero", pulls=(7839,), versions=("0.18.5", "0.18.6")),
    Case(name="fp32_accumulation", pulls=(7788,), versions=("0.18.3", "0.18.5")),
    Case(name="last_micro_batch", pulls=(7985,), versions=("0.18.9", "0.19.0"), ranks=2),
    Case(name="frozen_weights", pulls=(8029,), versions=("0.19.0", "0.19.1")),
    Case(name="hook_count", pulls=(7886,), versions=("0.18.6", "0.18.7")),
    Case(name="hpz_small_parameter", pulls=(8210,), versions=("0.19.4", "0.19.5"), ranks=4),
    Case(name="sequence_parallel_checkpoint", pulls=(8226,), versions=("0.19.5", "0.19.6"), ranks=2),
    Case(name="defaults", pulls=(8068, 8035, 8253, 8207), versions=("0.18.9", "0.19.8")),
)
"""Every case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a case gave under each release."""

    case: str
    versions: tuple[str, str]
    answers: tuple[dict[str, Any], dict[str, Any]]
    """Label → value, under each release."""


def answer_of(case: Case, version: str, environments: Environments) -> dict[str, Any]:
    """Returns what a case answers under one release; what stops it is an answer, too."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        script = CASES / f"{case.name}.py"
        problem = environments.run(script, path, version=version, ranks=case.ranks, limit_s=LIMIT_S)
        if not path.exists():
            print(f"{case.name} under {version}:\n{problem}", file=sys.stderr)
            return {"outcome": "failed"}
        answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return answer


def table(shown: Shown) -> str:
    """Returns the answers as a table in Markdown."""
    before, after = shown.answers
    lines = [f"| {shown.case} | DeepSpeed {shown.versions[0]} | {shown.versions[1]} |", "|---|---|---|"]
    for label in dict.fromkeys((*before, *after)):
        old, new = _text(before.get(label)), _text(after.get(label))
        lines.append(f"| {label} | {f'**{old}**' if old != new else old} | {new} |")
    return "\n".join(lines)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "–" if value is None else str(value)


def main(words: Sequence[str] | None = None) -> None:
    """Runs the cases and prints a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the environments")
    parser.add_argument("--only", choices=[case.name for case in CASES_IN_ORDER], action="append", help="cases to run")
    parser.add_argument("--json", type=Path, help="file for the answers; those of other cases in it stay")
    options = parser.parse_args(words)
    environments = Environments(folder=options.folder.resolve())
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for case in CASES_IN_ORDER:
        if options.only and case.name not in options.only:
            continue
        environments.make(case.versions)
        before, after = (answer_of(case, version, environments) for version in case.versions)
        shown = Shown(case=case.name, versions=case.versions, answers=(before, after))
        print(f"{table(shown)}\n", flush=True)
        kept[case.name] = asdict(shown)
        if options.json:
            options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
