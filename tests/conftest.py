"""Shared by all tests: their marks, the part of sweeps that runs, golden files and the `--update` option."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from dstrain.garbage import collect_seldom
from dstrain.launch.nodes.shared_memory import remove_buffers
from tests import environment
from tests.draws import NUM_PARTS, Draw, part_of
from tests.nvml import machine, nvml_library
from tests.train.engine import Engine

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

    from benchmarks.published.answers import Answer

__all__ = ["machine", "nvml_library"]

environment.clean()  # before workers and whatever else is started

GOLDEN = Path(__file__).parent / "golden"
MARKS = {
    "cluster": (
        *("tests/launch/test_hosts.py", "tests/launch/run/test_start.py", "tests/launch/filesync/test_sync.py"),
        *("tests/launch/test_slurm.py", "tests/launch/test_slurm_run.py", "tests/doctor/test_reach.py"),
        *("tests/doctor/test_network_run.py", "tests/doctor/test_network_hosts.py"),
    ),
    "engine": (
        *("tests/train/test_trace.py", "tests/cli/test_demo.py", "tests/launch/test_process.py"),
        "tests/launch/run/test_out_of_memory.py",
        *("tests/train/test_demo.py", "tests/monitor/sinks/test_swanlab.py", "tests/train/data/test_packing"),
        "tests/train/test_end_to_end.py::test_sigterm_while_blocked_in_a_collective_keeps_swanlabs_data",
        "tests/plan/memory/layers/test_every_n_layers.py::test_the_peak_is_that_of_transformers",
        "tests/plan/memory/layers/test_tiled_mlp.py::test_the_peak_is_that_of_transformers",
        "tests/plan/memory/layers/test_router_loss.py::test_the_loss_takes_what_the_model_allocates_for_it",
        "tests/cli/test_run.py::test_hand_edits_are_on_record_with_the_run",
        "tests/cli/test_plan.py::test_a_model_of_an_unknown_family_is_traced_and_says_so",
        "tests/cli/test_proposals.py::test_a_traced_model_is_not_sent_in_a_circle",
        "tests/cli/test_script_accelerate.py::test_the_next_line_trains_the_default_job",
        "tests/cli/test_doctor_network.py::test_the_ranks_of_one_host_are_measured_and_a_plan_for_it_reads_that",
        "tests/cli/test_script.py::test_prepare_writes_what_ranks_read_and_starts_nothing",
        "tests/cli/test_script.py::test_a_pod_leaves_with_a_checkpoint_and_bash_goes_on_to_the_end",
        "tests/launch/scripts/test_exports.py::test_fsdp2_and_ddp_train_the_demo_with_the_losses_of_zero_3_and_zero_1",
        "tests/test_measure.py::test_one_case_is_measured_on_the_cpu_and_compared_with_its_plan",
    ),
    "sweep": (
        *("tests/plan/search/test_bounds.py", "tests/plan/memory/test_fragmentation.py"),
        *("tests/plan/memory/test_closed_form.py", "tests/plan/memory/layers/test_against_trace.py"),
        *("tests/facts/model/test_tracer.py", "tests/config/lint/test_properties.py"),
        "tests/plan/search/test_out_of_memory.py",
        *("tests/cli/test_options.py", "tests/cli/test_bombs.py", "tests/test_fuzz.py"),
        "tests/config/explain/test_explain.py::test_no_configuration_that_is_json_breaks_an_explanation",
        "tests/test_docs.py::test_a_cell_of_the_matrix_is_the_plan",
        "tests/facts/cluster/test_hostfile.py::test_any_text_gives_hosts_or_problems_with_places",
        "tests/launch/nodes/test_protocol.py::test_a_message_has_the_types_of_its_fields",
        "tests/plan/search/test_search.py::test_bounds_lose_nothing",
        "tests/plan/memory/deepspeed/test_allocations.py::test_candidates_of_a_question_have_one_peak",
        "tests/test_published.py::test_the_planner_still_gives_the_stored_figures",
    ),
    "editors": (
        *("tests/config/test_language_server.py", "tests/launch/scripts/test_script_k8s"),
        *("tests/cli/test_completion.py", "tests/test_packaging.py", "tests/test_site.py"),
    ),
    "commands": (
        *("tests/cli/", "tests/test_docs.py", "tests/test_environment.py", "tests/facts/model/test_hub_config.py"),
        *("tests/plan/search/test_search.py", "tests/plan/search/test_grid.py"),
        *("tests/config/templates/test_templates.py", "tests/launch/filesync/test_gather_checkpoints.py"),
        "tests/test_draws.py::test_two_collections_are_equal",
        "tests/train/data/test_tokenized.py::test_a_killed_preparation_goes_on_where_it_was_by_two_at_once_and_run_finds_it",
        "tests/facts/data/test_lengths.py::test_lengths_are_those_of_training",
        "tests/test_architecture.py::test_a_verb_imports_what_it_needs",
        "tests/test_architecture.py::test_answering_imports_nothing_heavy",
    ),
}
"""What a test needs that takes long, by the beginning of its node id; a test of none of these is fast. A test with the
fixture `engine` needs the engine, too."""
BESIDE_CLUSTER = (
    "tests/launch/",
    "tests/cli/test_script.py",
    "tests/cli/test_doctor_network.py",
    "tests/test_measure.py",
)
"""Tests of the engine on the worker of a cluster, so that both take as long; three at a time slow each other down."""
COLLECTED: pytest.StashKey[list[str]] = pytest.StashKey()
"""The node ids of all tests, before any is left out."""

pytest_plugins = ["tests.launch.fixtures"]
# without the examples of earlier runs
settings.register_profile("dstrain", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dstrain")


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


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput["is_whole"] = node.config.option.is_whole


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    part = draw_of(config).part
    terminalreporter.write_line("sweeps: all parts" if part is None else f"sweeps: part {part} of {NUM_PARTS}")


@pytest.hookimpl(wrapper=True)  # before -m selects, and before a worker of xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Marks the tests; those of a file, all of the engine and all of a cluster are for one worker.

    Of sweeps, this run's part is left."""
    for item in items:
        mark = next((mark for mark, places in MARKS.items() if item.nodeid.startswith(places)), None)
        shares_ranks = "engine" in getattr(item, "fixturenames", ())
        mark = mark or ("engine" if shares_ranks else None)
        group = item.nodeid.partition("::")[0]
        if mark is not None:
            item.add_marker(mark)
        if mark in ("engine", "cluster"):
            group = "cluster" if item.nodeid.startswith(BESIDE_CLUSTER) and not shares_ranks else mark
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: [item.get_closest_marker(mark) is None for mark in MARKS])
    leave_out(config, items)
    yield
    if getattr(config.option, "loadgroup", False) and not all("@" in item.nodeid for item in items):
        raise pytest.UsageError("this pytest-xdist does not group tests under this pytest; see setup.cfg")


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


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves in a list of tests this run's part of each sweep, and marks all tests that are in parts as sweeps."""
    config.stash[COLLECTED] = [item.nodeid for item in items]
    draw, left = draw_of(config), []
    for item in items:
        is_fast = not any(map(item.get_closest_marker, MARKS))
        place = part_of(item.nodeid, is_whole=config.option.is_whole, is_fast=is_fast)
        if place is not None:
            item.add_marker("sweep")
        if not draw.has(place):
            left.append(item)
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [item for item in items if item not in gone]


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
    return Draw(part=None if config.option.part == "all" else int(config.option.part) % NUM_PARTS)


@pytest.fixture(scope="session")
def draw(request: pytest.FixtureRequest) -> Draw:
    return draw_of(request.config)


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
