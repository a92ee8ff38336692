"""Records what a checkout does, and compares two records: whether a change of the code changes what users get.

A record has three parts:
  commands   lines of benchmarks/same/commands.txt: exit codes, what is printed, the files that are written
  published  the predictions of benchmarks/predict.py for published runs, and their score
  losses     the loss of each step of every run that tests of training start

Times, paths, process ids and versions are left out. Inputs are those of benchmarks/same/ and of the commit INPUTS, so
that two records have the same questions whatever the checkouts have in their tests.

Examples: python benchmarks/same.py record before.json.xz
          python benchmarks/same.py record after.json.xz --checkout ../after --only commands --match hostfile
          python benchmarks/same.py compare before.json.xz after.json.xz --expected expected.txt

`record` adds to a file that exists, and needs the checkout's .venv and the history of git. `compare` exits with 1 if
something differs that is not expected; each line of the expected file is a pattern of the beginning of what `compare`
prints, or the pattern of a line of a difference (one space for several), then ` # ` and the reason.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INPUTS = "01bed8b3"
"""The commit whose recorded run, hostfiles and generated files are inputs."""
INPUT_PATHS = {"tests/report/night": "night", "hostfiles": "hostfiles", "tests/golden": "golden"}
PYTHON = ".venv/bin/python"
PARTS = ("commands", "published", "losses")
TRAINING = (
    *("tests/train/test_space.py", "tests/train/test_end_to_end.py", "tests/train/test_resume.py"),
    *("tests/train/test_preferences.py", "tests/train/test_experts.py", "tests/train/test_expert_adapters.py"),
    *("tests/train/test_optimizer.py", "tests/train/test_options.py", "tests/train/test_muon.py"),
    *("tests/train/test_bf16_states.py", "tests/train/test_images.py", "tests/train/data/test_packing.py"),
)
"""Tests that train and compare losses; those that a checkout does not have are left out."""
DEMO = (
    "dstrain gen-config --model $K/demo/model --gpus 2 --gpu 4090 --host-memory 64GiB --data $K/demo/train.jsonl"
    " > generated.log"
)
SCHEMAS = (".schema.json",)
DEMO_FILES = (".dstrain/lock.json", "ds_config.json", "generated.log", "hostfile", "job.yaml")
TIMEOUT_S = 300
LOSSES_TO = os.environ.get("DSTRAIN_LOSSES_TO", "")
"""Where a pytest that has this file as a plugin writes losses; read before tests clean the environment."""

# what differs between two runs of one checkout
VOLATILE = (
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?([.,]\d+)?(Z|\+00:00)?", "TIME"),
    (r"\b\d\d:\d\d:\d\d\b", "TIME"),
    (r"\b(pid|PID)(\W{1,4})\d+", r"\1\2PID"),
    (r"\b1[78]\d{8}(\.\d+)?\b", "EPOCH"),
    (r"\b\d+\.\d+(\.\d+)?\.?dev\d+\+g?[0-9a-f]+(\.d\d+)?", "VERSION"),
    (r"\bsha256:[0-9a-f]{16,}", "SHA"),
    (r"\b[0-9a-f]{40,64}\b", "SHA"),
    (r"/datasets/dstrain/[0-9a-f]{32}", "/datasets/dstrain/SHA"),
    (r"/tmp/same-\S+/case\S*/home", "$HOME"),
    (r"(master_port|MASTER_PORT)(\D{1,4})\d+", r"\1\2PORT"),
)


# Recording


def inputs(checkout: Path, to: Path) -> None:
    """Writes the inputs of commands: samples of this folder, files of INPUTS, and the demo's model and data."""
    archive = subprocess.run(
        ["git", "-C", str(checkout), "archive", INPUTS, *INPUT_PATHS], capture_output=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        for source, name in INPUT_PATHS.items():
            shutil.copytree(Path(folder, source), to / name)
    for found in (to / "golden").iterdir():
        if not (found / "ds_config.json").exists():
            shutil.rmtree(found)
    shutil.copytree(HERE / "same" / "imports", to / "imports")
    shutil.copytree(HERE / "same" / "data", to, dirs_exist_ok=True)
    line = [str(checkout / PYTHON), "-m", "dstrain.train.demo", str(to / "demo")]
    subprocess.run(line, check=True, capture_output=True, cwd=to)
    for name in ("train", "eval"):
        file = to / "demo" / f"{name}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:400]))


def environment(checkout: Path, home: Path, **more: str) -> dict[str, str]:
    """Returns variables that are the same for every checkout."""
    return more | {
        "PATH": f"{checkout}/.venv/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }


def lines_to_run() -> list[str]:
    """Returns the lines of commands.txt, one for each question if it says so."""
    source = (HERE / "questions.py").read_text(encoding="utf-8")
    questions = re.findall(r'Question\(\s*"(--model [^"]+)"', source)
    found = []
    for line in (HERE / "same" / "commands.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            found += [line.replace("{questions}", question) for question in questions] if "{q" in line else [line]
    return found


def record_commands(checkout: Path, match: str, jobs: int) -> dict[str, Any]:
    """Runs the lines that contain a text, and returns what became of each."""
    with tempfile.TemporaryDirectory(prefix="same-") as name:
        root = Path(name).resolve()
        kit = root / "kit"
        kit.mkdir()
        inputs(checkout, kit)

        def run(at: int, line: str) -> dict[str, Any]:
            folder, home = root / f"case{at}" / "here", root / f"case{at}" / "home"
            folder.mkdir(parents=True)
            home.mkdir()
            found = run_line(line, folder, environment(checkout, home, K=str(kit)))
            places = {Path.cwd(): "CWD", folder: "HERE", home: "HOME", kit: "KIT", checkout.resolve(): "CHECKOUT"}
            shutil.rmtree(folder.parent)
            result: dict[str, Any] = normal(found, {str(path): name for path, name in places.items()})
            return result

        lines = [line for line in lines_to_run() if match in line]
        with ThreadPoolExecutor(jobs) as pool:
            return dict(zip(lines, pool.map(run, range(len(lines)), lines), strict=True))


def run_line(line: str, folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    """Returns exit code, output and new files of a line of bash."""
    shell = ["timeout", "-k", "5", str(TIMEOUT_S), "bash", "-c", line.replace("{demo}", DEMO)]
    done = subprocess.run(
        shell, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False
    )
    files = {}
    # schemas are the same for every gen-config, and the demo's files in every line that begins with them
    left_out: tuple[str, ...] = () if line.startswith("dstrain gen-config --model qwen3-0.6b") else SCHEMAS
    left_out += DEMO_FILES if line.startswith("{demo} ") else ()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if not str(path.relative_to(folder)).endswith(left_out):
            files[str(path.relative_to(folder))] = parsed(path.read_text(encoding="utf-8", errors="replace"))
    return {"exit code": done.returncode, "stdout": parsed(done.stdout), "stderr": done.stderr, "files": files}


def parsed(text: str) -> Any:
    """Returns the data of JSON, and other text as it is."""
    try:
        return json.loads(text) if text.lstrip()[:1] in ("{", "[") else text
    except ValueError:
        return text


def normal(value: Any, places: dict[str, str]) -> Any:
    """Returns a value whose texts name no place and no time."""
    if isinstance(value, dict):
        return {normal(key, places): normal(item, places) for key, item in value.items()}
    if isinstance(value, list):
        pairs = zip(["", *value], value, strict=False)
        return ["PORT" if option == "--master_port" else normal(item, places) for option, item in pairs]
    if isinstance(value, float) and 1.7e9 < value < 1.9e9:
        return "EPOCH"
    if not isinstance(value, str):
        return value
    for path in sorted(places, key=len, reverse=True):
        value = value.replace(path, f"${places[path]}")
    for pattern, name in VOLATILE:
        value = re.sub(pattern, name, value)
    return value


def record_published(checkout: Path) -> dict[str, Any]:
    """Returns the score that predict.py prints, and each of its comparisons."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "score.json")
        line = [str(checkout / PYTHON), "benchmarks/predict.py", "--json", str(out)]
        done = subprocess.run(line, cwd=checkout, check=True, capture_output=True, text=True)
        data = json.loads(out.read_text())
    rows: dict[str, Any] = {"printed": done.stdout, "score": data["score"], "halves": data["halves"]}
    count: Counter[str] = Counter()
    for kind in ("comparisons", "verdicts"):
        for row in data[kind]:
            name = f"{kind} {row.get('id', row.get('row'))}"
            count[name] += 1
            rows[f"{name} {count[name]}"] = row
    return rows


def record_losses(checkout: Path, match: str) -> dict[str, Any]:
    """Trains all runs of the tests of training, whole sweeps included, and returns the losses of each."""
    tests = [test for test in TRAINING if (checkout / test).exists() and match in test]
    with tempfile.TemporaryDirectory(prefix="same-") as name:
        out = Path(name, "losses.jsonl")
        more = {"DSTRAIN_LOSSES_TO": str(out), "PYTHONPATH": str(HERE)}
        line = [str(checkout / PYTHON), "-m", "pytest", "-q", "-p", "same", "-p", "no:cacheprovider", "--part", "all"]
        line += ["--basetemp", f"{name}/tests", *tests]
        subprocess.run(line, cwd=checkout, env={**os.environ, **more}, check=False, stdout=sys.stderr)
        return dict(json.loads(line) for line in out.read_text().splitlines())


def pytest_configure(config: Any) -> None:
    """As a plugin of pytest: writes the losses of each run that the tests' engine has trained to its end."""
    from tests.train.engine import Engine
    from tests.train.launching import losses

    trains = Engine.train

    def train(self: Engine, folder: Path, **options: Any) -> None:
        trains(self, folder, **options)
        if options.get("kill_at") is None and (folder / "metrics.jsonl").exists():
            base = config._tmp_path_factory.getbasetemp().resolve()
            # the space has a folder of its own, whose name ends in random letters
            name = re.sub(r"/space\w{8}/", "/space/", str(folder.resolve().relative_to(base)))
            with Path(LOSSES_TO).open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, losses(folder)]) + "\n")

    Engine.train = train  # type: ignore[method-assign]


# Comparing


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Returns where two records differ, in what, and how; parts that one of them lacks are no difference."""
    for part in PARTS:
        if part not in before or part not in after:
            continue
        old, new = before[part], after[part]
        for name in (*old, *(name for name in new if name not in old)):
            if name not in new or name not in old:
                yield f"{part}: {name}", "only before" if name in old else "only after", ""
                continue
            earlier, later = aspects(old[name]), aspects(new[name])
            for aspect in sorted({*earlier, *later}):
                if earlier.get(aspect) != later.get(aspect):
                    yield f"{part}: {name}", aspect, diff(earlier.get(aspect, ""), later.get(aspect, ""))


def aspects(result: Any) -> dict[str, Any]:
    """Returns the compared parts of a result: for a command its exit code, output and each file."""
    if not (isinstance(result, dict) and "files" in result):
        return {"value": result}
    files = {f"file {name}": text for name, text in result["files"].items()}
    return {key: value for key, value in result.items() if key != "files"} | files


def diff(old: Any, new: Any) -> str:
    """Returns the lines that differ, without context."""
    before, after = (value if isinstance(value, str) else json.dumps(value, indent=1) for value in (old, new))
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def compare(before: dict[str, Any], after: dict[str, Any], expected: list[tuple[str, str]], most: int) -> bool:
    """Prints each difference that is not expected and how many are; returns whether all are."""
    unexpected, reasons, names = 0, Counter[str](), set()
    for name, aspect, change in differences(before, after):
        if aspect != "only after":
            names.add(name)
        head = f"{name} · {aspect}"
        reason = next((why for pattern, why in expected if fnmatch.fnmatchcase(head, f"{pattern}*")), None)
        whys = [
            next((why for pattern, why in expected if fnmatch.fnmatchcase(" ".join(line.split()), pattern)), None)
            for line in change.splitlines()
        ]
        lines = [line for line, why in zip(change.splitlines(), whys, strict=True) if why is None]
        if reason is not None or (whys and not lines):
            reasons[reason or str(whys[0])] += 1
            continue
        unexpected += 1
        print(head, *(f"    {line[:160]}" for line in lines[:most]), sep="\n")
        if len(lines) > most:
            print(f"    … {len(lines) - most} more lines")
    for reason, count in reasons.most_common():
        print(f"{count} expected: {reason}")
    total = sum(len(before[part]) for part in PARTS if part in before and part in after)
    print(f"{total - len(names)} of {total} equal, {unexpected} unexpected differences")
    return unexpected == 0


def load(path: Path) -> dict[str, Any]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def save(path: Path, data: dict[str, Any]) -> None:
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        json.dump(data, file, indent=0, ensure_ascii=False)


def main() -> int:
    options = read_options()
    if options.verb == "compare":
        listed = options.expected.read_text().splitlines() if options.expected else []
        expected = [(pattern, reason) for pattern, _, reason in (line.rpartition(" # ") for line in listed) if pattern]
        return 0 if compare(load(options.before), load(options.after), expected, options.lines) else 1
    checkout = options.checkout.resolve()
    data = load(options.file) if options.file.exists() else {}
    for part in options.only or PARTS:
        if part == "commands":
            found = record_commands(checkout, options.match, options.jobs)
        elif part == "published":
            found = record_published(checkout)
        else:
            found = record_losses(checkout, options.match)
        data[part] = {**data.get(part, {}), **found}
        save(options.file, data)
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    record = verbs.add_parser("record", help="run a checkout and write what it did")
    record.add_argument("file", type=Path)
    record.add_argument("--checkout", type=Path, default=HERE.parent)
    record.add_argument("--only", choices=PARTS, action="append", help="parts to record [default: all]")
    record.add_argument("--match", default="", help="a text of the command lines, or of the tests that train, to run")
    record.add_argument("--jobs", type=int, default=1, help="command lines at a time")
    both = verbs.add_parser("compare", help="print what differs")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    both.add_argument("--expected", type=Path, help="differences with their reasons")
    both.add_argument("--lines", type=int, default=8, help="lines of a difference to print at most")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
