"""What is installed is what is in the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.editors

ROOT = Path(__file__).parent.parent
DATA = ("ds_templates", "launch", "hostfiles")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a wheel from a copy: a stale build folder would ship deleted files again."""
    copy = tmp_path_factory.mktemp("tree") / "dstrain"
    ignored = shutil.ignore_patterns(".venv", ".git", ".cache", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, copy, ignore=ignored)
    out = copy.parent / "dist"
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*build, str(copy)], check=True, capture_output=True)
    return next(out.glob("*.whl"))


def tree() -> set[str]:
    """Returns the files that a wheel must hold, by their names inside it."""
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "dstrain").rglob("*.py")}
    code |= {"dstrain/py.typed", "dstrain/facts/model/aliases.json"}
    code |= {str(path.relative_to(ROOT)) for path in (ROOT / "dstrain").rglob("*.toml")}
    pages = (path for path in (ROOT / "dstrain/report").glob("page.*") if path.suffix != ".py")
    code |= {str(path.relative_to(ROOT)) for path in pages}
    data = {f"dstrain/_data/{path.relative_to(ROOT)}" for folder in DATA for path in (ROOT / folder).iterdir()}
    return code | data


def test_the_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == tree()


def test_an_installed_wheel_finds_its_templates(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import dstrain; from dstrain.paths import shipped;"
        "print(dstrain.__file__); print((shipped('ds_templates') / 'zero3.json.j2').is_file())"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == [str(tmp_path / "dstrain" / "__init__.py"), "True"]


def test_a_bare_checkout_finds_its_templates() -> None:
    code = "from dstrain.paths import shipped; print(shipped('launch'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == str(ROOT / "launch")
