"""The shape that import contracts cannot say."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.sources import nodes_of, tree_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dstrain"
HEAVY = ("torch", "transformers", "deepspeed", "swanlab", "accelerate", "peft", "datasets", "numpy")


LAUNCHER = ("dstrain.launch", "dstrain.doctor")
GEN_CONFIG = ("gen-config", "--gpus", "16", "--model", "qwen3-32b")
LIGHT = ("dstrain", *(f"dstrain.{name}" for name in ("cli", "cli.group", "cli.main", "errors", "garbage", "removed")))
"""All of dstrain that its help needs."""


def imported(arguments: Sequence[str], cwd: Path) -> list[str]:
    """Returns the names of the modules that a process has imported when it has carried out a command."""
    code = (
        "import sys\nfrom dstrain.cli.main import main\n"
        f"try:\n    main({list(arguments)!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, check=True)
    return done.stderr.splitlines()[-1].split()


IMPORT = ("import", "train.yaml", "--gpus", "16")


@pytest.mark.commands
@pytest.mark.parametrize(
    "arguments", [[*GEN_CONFIG, "--dry-run"], ["run", "--help"], [*IMPORT]], ids=lambda words: words[0]
)
def test_answering_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("model_name_or_path: Qwen/Qwen3-32B\nstage: sft\n")
    assert not set(HEAVY).intersection(imported(arguments, tmp_path))


def test_help_imports_no_verb_and_no_third_party_module_but_click(tmp_path: Path) -> None:
    modules = imported(["--help"], tmp_path)
    assert {name for name in modules if name.partition(".")[0] == "dstrain"} == set(LIGHT)
    roots = {name.partition(".")[0] for name in modules} - {"dstrain", "__main__"} - sys.stdlib_module_names
    assert {name for name in roots if not name.startswith(("__editable__", "_"))} <= {
        *("click", "typing_extensions"),
        "sitecustomize",  # the system's
    }


@pytest.mark.commands
@pytest.mark.parametrize(
    ("arguments", "foreign"),
    [
        (GEN_CONFIG, LAUNCHER),
        (("gen-config", "--help"), (*LAUNCHER, "dstrain.config", "dstrain.plan.search", "rich", "jinja2")),
        (("plan", *GEN_CONFIG[1:]), (*LAUNCHER, "dstrain.config.lint", "dstrain.config.edits")),
        (("show", "template"), (*LAUNCHER, "dstrain.facts", "dstrain.plan")),
        (("show", "schema"), (*LAUNCHER, "dstrain.plan")),
        (("show", "completion", "fish"), (*LAUNCHER, "dstrain.facts", "dstrain.plan", "dstrain.config")),
    ],
    ids=lambda words: words[0],
)
def test_a_verb_imports_what_it_needs(arguments: tuple[str, ...], foreign: tuple[str, ...], tmp_path: Path) -> None:
    strange = [name for name in imported(arguments, tmp_path) if f"{name}.".startswith(tuple(f"{n}." for n in foreign))]
    assert strange == []


@cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_holds_a_docstring_and_nothing_else(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return
    body = tree_of(path).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


@pytest.mark.parametrize("verb", ["demo", "export", "gen_config", "import", "run", "show"])
def test_a_verb_is_a_file_and_has_its_tests(verb: str) -> None:
    assert (PACKAGE / "cli" / "verbs" / f"{verb}.py").is_file()
    assert (ROOT / "tests" / "cli" / f"test_{verb}.py").is_file()


@pytest.mark.parametrize("module", ["swanlab", "jinja2", "pynvml"])
def test_a_giant_is_imported_in_one_place(module: str) -> None:
    importers = set()
    for path in modules():
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            if any(name.split(".")[0] == module for name in names):
                importers.add(path.parent.name if module == "jinja2" else path.name)
    assert len(importers) <= (2 if module == "pynvml" else 1), importers


def test_a_child_that_is_python_takes_no_modules_from_the_current_folder() -> None:
    """In every list of words `-P` or `-I` stands behind this interpreter, and one of them before `-m` or `-c`."""
    unsafe = []
    for path in modules():
        for node in nodes_of(path):
            if not isinstance(node, ast.List | ast.Tuple):
                continue
            words = [ast.unparse(word).strip("'") for word in node.elts]
            for word, after in pairwise(words):
                is_free = word not in {"-P", "-I", "bash", "topo"} and after in {"-m", "-c"}
                if is_free or (word == "sys.executable" and after not in {"-P", "-I"}):
                    unsafe.append(f"{path.name}:{node.lineno}")
    for path in sorted((ROOT / "launch").glob("*.j2")):
        if re.search(r'python"? -[mc]', path.read_text(encoding="utf-8"), re.IGNORECASE):
            unsafe.append(path.name)
    assert unsafe == []


LONG_FUNCTIONS = {
    "facts/cluster/cluster.py:describe": 43,
    "job/file.py:_absolute": 41,
    "launch/prepare/prepare.py:prepare": 42,
}
"""Functions of more than 40 lines and their lines; a shorter one leaves the table, and none is added."""


def test_modules_have_at_most_500_lines() -> None:
    sizes = {str(path.relative_to(PACKAGE)): len(path.read_bytes().splitlines()) for path in modules()}
    assert {name: size for name, size in sizes.items() if size > 500} == {}


def without_comments(lines: Sequence[str]) -> int:
    """Returns the number of lines that are more than a comment: no limit of lines is a reason to leave one out."""
    return sum(not line.lstrip().startswith("#") for line in lines)


def test_functions_have_at_most_40_lines() -> None:
    sizes = {}
    for path in modules():
        lines = path.read_text(encoding="utf-8").split("\n")
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = without_comments(lines[node.lineno - 1 : node.end_lineno])
                sizes[f"{path.relative_to(PACKAGE)}:{node.name}"] = size
    assert {name: size for name, size in sizes.items() if size > LONG_FUNCTIONS.get(name, 40)} == {}


def imports() -> dict[str, set[str]]:
    """Returns the modules of the package that each of them imports: at once, in a function, or for types alone."""
    paths = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules()}
    names = {name.removesuffix(".__init__") for name in paths.values()}
    found: dict[str, set[str]] = {}
    for path, name in paths.items():
        wanted = set()
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                wanted |= {member if member in names else str(node.module) for member in members}
        found[name.removesuffix(".__init__")] = wanted & names
    return found


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Returns the strongly connected components of more than one node, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(component := stack[at:]) > 1:
                found.add(frozenset(component))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f", "a"}}
    assert circles(graph) == {frozenset("abc"), frozenset("fg")}


def test_no_module_imports_what_imports_it() -> None:
    """Types that name each other belong into one module; what needs another part is given it by whoever calls."""
    assert [sorted(circle) for circle in circles(imports())] == []


def lines() -> dict[str, int]:
    """Returns the lines of the package and of each package in it, without those of comments alone; removed.py grows as
    they shrink."""
    sizes: dict[str, int] = {}
    for path in modules():
        folder, *more = path.relative_to(PACKAGE).parts
        if folder != "removed.py":
            name = f"dstrain/{folder}" if more else "dstrain"
            sizes[name] = sizes.get(name, 0) + without_comments(path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(sizes.items()))


def test_packages_do_not_grow(request: pytest.FixtureRequest) -> None:
    """tests/lines.json: the most lines of each package. `--update` writes smaller numbers; a larger one, and that of a
    new package, is written by hand, with its reason in the commit."""
    file = Path(__file__).with_name("lines.json")
    most, now = json.loads(file.read_text(encoding="utf-8")), lines()
    grown = {
        name: f"{size} lines, at most {most.get(name, 0)}" for name, size in now.items() if size > most.get(name, 0)
    }
    if request.config.getoption("--update"):
        fewest = {name: min(size, most.get(name, size)) for name, size in now.items()}
        file.write_text(json.dumps(fewest, indent=1) + "\n", encoding="utf-8")
    assert grown == {}


def test_a_test_stands_where_what_it_tests_stands() -> None:
    """Of the files in folders, 85 % are in that of a package of which they import or are named by a module; the others
    type commands or train."""
    files, strays = list((ROOT / "tests").glob("*/**/test_*.py")), []
    for path in files:
        place = path.relative_to(ROOT / "tests").parent
        package = ".".join(("dstrain", *place.parts))
        froms = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom)]
        is_there = any(f"{node.module}.".startswith(f"{package}.") for node in froms)
        if not is_there and not any((PACKAGE / place).rglob(f"{path.stem.removeprefix('test_')}.py")):
            strays.append(f"{place}/{path.name}")
    assert len(strays) <= 0.15 * len(files), strays


_WORDS = {"problem", "hint", "effect", "fix", "title", "reason", "reasons", "place", "meaning"}
_READS = {"split", "rsplit", "partition", "rpartition", "splitlines", "startswith", "endswith"}
_READS |= {"removeprefix", "removesuffix", "find", "index"}
_MATCHES = {"match", "search", "fullmatch", "findall", "finditer", "split", "sub"}
_MAY_READ = {
    "dstrain/job/yaml_source.py": "ruamel's messages",
    "dstrain/doctor/checks.py": "OpenSSL's messages",
    "dstrain/cli/output/explain_file.py": "the full stop of a key's meaning",
}
"""Modules that may look into a text of these names → what they read there."""


def _own_errors() -> set[str]:
    """Returns the names of the errors of the package."""
    names, classes = (
        {"DstrainError"},
        [node for path in modules() for node in nodes_of(path) if isinstance(node, ast.ClassDef)],
    )
    while True:
        more = {node.name for node in classes for base in node.bases if isinstance(base, ast.Name) and base.id in names}
        if more <= names:
            return names
        names |= more


def _quotes(node: ast.AST, caught: set[str]) -> bool:
    """Returns whether an expression is made of a message of the package, or of the text of an error in `caught`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in _WORDS:
            return True
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "str":
            return any(isinstance(argument, ast.Name) and argument.id in caught for argument in part.args)
    return False


def _reads_words(node: ast.AST, caught: set[str]) -> bool:
    """Returns whether a node looks for something in a message."""
    if isinstance(node, ast.Compare):
        pairs = zip(node.ops, node.comparators, strict=True)
        return any(isinstance(operator, ast.In | ast.NotIn) and _quotes(right, caught) for operator, right in pairs)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    is_read = node.func.attr in _READS and _quotes(node.func.value, caught)
    return is_read or (node.func.attr in _MATCHES and any(_quotes(argument, caught) for argument in node.args))


def test_no_message_is_read_back() -> None:
    """What code decides by is data: the place of an error, the topic of a reason, the exit code of a rank."""
    own, readers = _own_errors(), set()
    for path in modules():
        handlers = [node for node in nodes_of(path) if isinstance(node, ast.ExceptHandler) and node.name]
        scopes: list[tuple[Sequence[ast.AST], set[str]]] = [(nodes_of(path), set())]
        for handler in handlers:
            kinds = {part.id for part in ast.walk(handler.type or handler) if isinstance(part, ast.Name)}
            scopes += [(tuple(ast.walk(handler)), {str(handler.name)})] if kinds & own else []
        if any(_reads_words(node, caught) for nodes, caught in scopes for node in nodes):
            readers.add(path.relative_to(ROOT).as_posix())
    assert readers == set(_MAY_READ)
