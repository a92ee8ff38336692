"""Shared by all tests: golden files and their `--update` option."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite golden files and generated parts of the README")


@pytest.fixture(scope="session", autouse=True)
def _shared_memory_is_given_back() -> Iterator[None]:
    """Removes what DeepSpeed's CPU collectives leave behind: 66 MiB of RAM for each rank of every launch."""
    folder = Path("/dev/shm")
    before = set(folder.glob("deepspeed_allreduce_buffer_*"))
    yield
    for buffer in set(folder.glob("deepspeed_allreduce_buffer_*")) - before:
        buffer.unlink(missing_ok=True)


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
