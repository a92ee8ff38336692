"""Shared by all tests: their marks, the part of sweeps that runs, golden files and the `--update` option."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from dstrain.garbage import collect_seldom
from dstrain.launch.nodes.node_runner import remove_buffers
from tests import environment
from tests.draws import Draw, Place, part_of
from tests.nvml import machine, nvml_library
from tests.train.engine import Engine

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

    from benchmarks.published.answers import Answer

__all__ = ["machine", "nvml_library"]

environment.clean()  # before workers and whatever else is started

FIXTURES = {"engine": {"engine"}, "cluster": {"network", "slurm"}, "commands": {"made_demo"}}
"""Marks of tests by the fixtures that they use."""
GROUPS = ("network", "engine", "slurm")
"""Fixtures whose tests are for one worker, since hosts, warm ranks and a scheduler are made once; the longest first."""
GOLDEN = Path(__file__).parent / "golden"
COMMANDS = Path(__file__).parent / "cli"
"""Tests that type commands."""
MARKS = ("cluster", "engine", "sweep", "editors", "commands")
"""Marks of slow tests (described in setup.cfg), the slowest first; a test without any of them is fast."""

pytest_plugins = ["tests.launch.fixtures"]
EXAMPLES = 25
"""Examples of a property that a run tries: each run has others, and all parts of the sweeps have four times as many."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite golden files and generated parts of pages")
    parser.addoption("--part", default="0", help="which part of the sweeps runs: a number, or all [default: 0]")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    """Finds whether this run is of all tests, which workers are told; Hypothesis has other examples in other parts.

    Puts the programs of this Python first: ninja compiles again what another release of it has built."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    config.option.is_whole = getattr(config, "workerinput", {}).get("is_whole", is_whole)
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(draw_of(config).part or 0)
    # without the examples of earlier runs
    settings.register_profile(
        "dstrain",
        max_examples=4 * EXAMPLES if draw_of(config).part is None else EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("dstrain")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput["is_whole"] = node.config.option.is_whole


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    part = draw_of(config).part
    terminalreporter.write_line("sweeps: all parts" if part is None else f"sweeps: part {part}")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out helpers, which hold no doctests: looking for some would import torch for every run."""
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None


@pytest.hookimpl(wrapper=True)  # before -m selects, and before a worker of xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Marks what needs an engine, hosts or commands, and names the worker's group. Of sweeps, this run's part is left.

    The longest groups begin first, so that no worker ends long after the others."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        for mark, needs in FIXTURES.items():
            if not needs.isdisjoint(fixtures):
                item.add_marker(mark)
        if item.path.is_relative_to(COMMANDS):
            item.add_marker("commands")
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    draw, left = draw_of(config), set()
    for item in items:
        place = place_of(item, is_whole=config.option.is_whole)
        if place is not None:
            item.add_marker("sweep")
            if not draw.has(place):
                left.add(item)
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]
    items.sort(
        key=lambda item: (
            [fixture not in getattr(item, "fixturenames", ()) for fixture in GROUPS],
            [item.get_closest_marker(mark) is None for mark in MARKS],
        )
    )
    yield
    if getattr(config.option, "loadgroup", False) and not all("@" in item.nodeid for item in items):
        raise pytest.UsageError("this pytest-xdist does not group tests under this pytest; see setup.cfg")


def group_of(item: pytest.Item) -> str:
    """Returns the group whose tests are for one worker: a fixture that takes long to make, or the test's file."""
    fixtures = getattr(item, "fixturenames", ())
    return next((fixture for fixture in GROUPS if fixture in fixtures), str(item.path))


def place_of(item: pytest.Item, *, is_whole: bool) -> Place | None:
    """Returns in which part of how many a test is, by its own mark `parts` or that of its file; None: in every run.

    That of a file is for the slow tests in it, and for runs of all tests: who names a file gets all of it.
    """
    for node, mark in item.iter_markers_with_node("parts"):
        if node is item or (is_whole and any(map(item.get_closest_marker, MARKS))):
            return part_of(item.nodeid, *mark.args, **mark.kwargs)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Lets ranks go first where cores are scarce: they wait for each other, and the time-outs of a cluster are real."""
    if not any(map(item.get_closest_marker, ("cluster", "engine"))):
        return (yield)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, before - 5)
    try:
        return (yield)
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def pytest_collection_finish() -> None:
    """Lets torch compute in one thread: several spin where they wait for a core. Lets the garbage collector leave out
    what has been imported, and look as seldom as in the command line."""
    gc.collect()
    gc.freeze()
    collect_seldom()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Removes what DeepSpeed's CPU collectives left behind: 66 MiB of RAM for each rank of every launch."""
    if not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        remove_buffers()


def pytest_unconfigure() -> None:
    """Collects garbage once: pytest does so twice, to hear of files that were never closed."""
    gc.collect()
    gc.freeze()


def asked_for(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Returns the values of a parameter that are left in the fixture's module, for which alone it has to work."""
    return [value for (value,) in asked_together(request, parameter)]


def asked_together(request: pytest.FixtureRequest, *parameters: str) -> list[tuple[Any, ...]]:
    """Returns the values of several parameters in the tests that have all of them and are left in the fixture's
    module."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    named = [call.params for call in calls if call is not None and set(parameters) <= set(call.params)]
    return [tuple(values[parameter] for parameter in parameters) for values in named]


def draw_of(config: pytest.Config) -> Draw:
    return Draw(part=None if config.option.part == "all" else int(config.option.part))


@pytest.fixture(scope="session")
def draw(request: pytest.FixtureRequest) -> Draw:
    return draw_of(request.config)


_NUMBERS = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test's own; pytest's fixture reads the names of all folders of the run to find a new one."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{name}_{next(_NUMBERS)}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(scope="session")
def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run have in common."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def made_demo(of_all_workers: Path) -> Path:
    """The demo's model and data, which the first worker makes that needs them; to be copied by whoever changes them."""
    folder, part = of_all_workers / "demo", of_all_workers / "demo.part"
    with FileLock(of_all_workers / "demo.lock"):
        if not folder.exists():
            line = [sys.executable, "-m", "dstrain.train.demo", str(part)]
            subprocess.run(line, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            part.rename(folder)
    return folder


@pytest.fixture(scope="session")
def answers() -> tuple[Answer, ...]:
    """The stored prediction of every published run beside its measurements."""
    from benchmarks import predict  # loads the planner, which few tests need
    from benchmarks.published.answers import answer
    from benchmarks.published.figures import read_csv
    from benchmarks.published.rows import read

    stored = read_csv(predict.PUBLISHED / "predicted.csv")
    return tuple(answer(row, stored.get(row.id)) for row in read(predict.PUBLISHED / "published_runs.csv"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the golden file of that name, or rewrites the file under --update."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest --update"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs: run pytest --update and read the diff"

    return compare


@pytest.fixture(scope="session")
def need() -> Callable[[object, str], None]:
    """Returns a function that skips a test where what it needs is not there, and says what is missing.

    With DSTRAIN_TEST_ALL=1, as .ci/run has it, such a test fails instead: nothing is left out unseen.
    """

    def require(is_there: object, missing: str) -> None:
        if is_there:
            return
        if os.environ.get("DSTRAIN_TEST_ALL") == "1":
            pytest.fail(f"{missing}, and DSTRAIN_TEST_ALL=1 leaves no test out", pytrace=False)
        pytest.skip(missing)

    return require


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Starts ranks on the CPU."""
    with Engine(tmp_path_factory.mktemp("engine")) as engine:
        yield engine
