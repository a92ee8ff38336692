"""`dstrain lint`."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Type

GOOD = (
    '{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",\n "gradient_clipping": "auto",\n'
)
TYPO = GOOD + ' // mine\n "zero_optimization": {"stage": 2, "overlap_com": true}}\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "ds_config.json"
    path.write_text(text)
    return path


def test_an_error_exits_with_3_and_says_where_what_and_the_fix(dstrain: Type, tmp_path: Path) -> None:
    write(tmp_path, GOOD + ' "zero_optimization": {"stage": 2}}')
    done = dstrain("lint")
    assert (done.returncode, done.stdout, "no problems" in done.stderr) == (0, "", True)
    write(tmp_path, TYPO)
    done = dstrain("lint", "ds_config.json")
    assert (done.returncode, "\x1b" in done.stdout) == (3, False)
    problem = '"overlap_com" is not a key of zero_optimization'
    assert f"ds_config.json:4:36: error DS101 /zero_optimization/overlap_com: {problem}" in done.stdout
    assert 'fix: did you mean "overlap_comm"?' in done.stdout
    assert "1 error, 1 note; 1 fixable with --fix" in done.stderr


def test_known_faults_are_those_of_the_release_that_is_named(dstrain: Type, tmp_path: Path) -> None:
    zero = '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
    write(tmp_path, GOOD.replace('steps": "auto"', 'steps": 8') + zero)
    done = dstrain("lint", "--deepspeed", "0.18.9")
    assert done.returncode == 3
    assert "error DS951 /zero_optimization/offload_optimizer: deepspeed 0.18.9: ZeRO-2 with" in done.stdout
    assert "pip install 'deepspeed>=0.19.0'" in done.stdout
    assert "DS951" not in dstrain("lint", "--deepspeed", "0.19.0").stdout + dstrain("lint").stdout
    done = dstrain("lint", "--deepspeed", "newest")
    assert (done.returncode, '"newest" is not a release such as 0.18.9' in done.stderr) == (2, True)


def test_json_has_what_an_editor_needs(dstrain: Type, tmp_path: Path) -> None:
    write(tmp_path, TYPO)
    found = json.loads(dstrain("lint", "--json").stdout)
    assert found["schema"] == 1
    (error,) = [each for each in found["findings"] if each["severity"] == "error"]
    assert (error["rule"], error["pointer"]) == ("DS101", "/zero_optimization/overlap_com")
    assert (error["file"], error["line"], error["column"]) == ("ds_config.json", 4, 36)
    assert set(error) == {"rule", "severity", "pointer", "file", "line", "column", "problem", "effect", "fix"}


def test_fix_mends_the_file_and_keeps_the_rest(dstrain: Type, tmp_path: Path) -> None:
    path = write(tmp_path, TYPO)
    path.chmod(0o640)
    assert dstrain("lint", "--fix", "-n").stdout == TYPO.replace("overlap_com", "overlap_comm")
    assert path.read_text() == TYPO
    done = dstrain("lint", "--fix")
    assert (done.returncode, path.read_text()) == (0, TYPO.replace("overlap_com", "overlap_comm"))
    assert path.stat().st_mode & 0o777 == 0o640
    assert "fixed ds_config.json:4:36" in done.stderr


def test_strict_fails_for_warnings(dstrain: Type, tmp_path: Path) -> None:
    write(tmp_path, '{"train_batch_size": "auto", "zero_optimization": {"stage": 2}}')
    assert dstrain("lint").returncode == 0
    assert dstrain("lint", "--strict").returncode == 3
    assert dstrain("lint", "--strict", "--ignore", "DS402", "--ignore", "DS403").returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ignore", "DS999"), '--ignore "DS999": unknown rule'),
        (("nowhere.json",), "nowhere.json: no such file"),
        ((".",), "cannot be read"),
        (("bytes.json",), "byte 7 is not UTF-8"),
    ],
)
def test_a_wrong_word_is_one_clear_error(dstrain: Type, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    write(tmp_path, TYPO)
    (tmp_path / "bytes.json").write_bytes(b'{"a": "\xff"}')
    done = dstrain("lint", *words)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (3, True, False), done.stderr


def test_the_job_beside_it_is_asked(dstrain: Type, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace('"gradient_clipping": "auto"', '"gradient_clipping": 0.3'))
    path.write_text(path.read_text() + ' "zero_optimization": {"stage": 2}}')
    (tmp_path / "job.yaml").write_text("model: Qwen/Qwen3-8B\noutput_dir: out\n")
    done = dstrain("lint")
    assert done.returncode == 3
    assert "ds_config.json:2:2: error DS410 /gradient_clipping: gradient_clipping is 0.3" in done.stdout
    assert dstrain("lint", "--fix").returncode == 3  # only a person knows which of the two is meant


def test_a_hostfile_with_faults_is_linted_with_it(dstrain: Type, tmp_path: Path) -> None:
    write(tmp_path, GOOD + ' "zero_optimization": {"stage": 2}}')
    (tmp_path / "job.yaml").write_text("model: Qwen/Qwen3-8B\noutput_dir: out\nhostfile: hostfile\n")
    (tmp_path / "hostfile").write_text("node1 slot=8\nnode2: slots=8\n")
    done = dstrain("lint")
    assert done.returncode == 3
    assert all(text in done.stdout for text in ("hostfile:1:", "hostfile:2:", "DS805"))


def test_placeholders_and_slots_that_are_not_the_plans_are_told(dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", "--gpus", "16", "--model", "qwen3-8b")
    done = dstrain("lint")
    assert done.returncode == 0
    assert "hostfile:1:1: warning DS805: CHANGE-ME-1 is a placeholder" in done.stdout
    (tmp_path / "hostfile").write_text("node1 slots=8\n")
    done = dstrain("lint")
    assert "hostfile:1:1: warning DS806: 8 slots in total, but the plan is for 16 GPUs" in done.stdout
