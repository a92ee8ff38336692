"""Job files: strict, with places, and overrides on top."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Schedule, SinkName
from dstrain.config import jsonc
from dstrain.errors import InvalidConfig
from dstrain.job.file import read_job
from dstrain.job.model_changes import Lora
from dstrain.job.yaml_source import parse_yaml
from dstrain.monitor.sinks.registry import SINKS
from dstrain.paths import shipped

JOB = "model: org/model\noutput_dir: out\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("written", ["1e-5", "1.0e-5", "0.00001", "1E-5"])
def test_a_learning_rate_is_a_number_however_and_wherever_it_is_written(tmp_path: Path, written: str) -> None:
    assert read_job(write(tmp_path, JOB + f"learning_rate: {written}\n")).job.learning_rate == 1e-5
    assert read_job(write(tmp_path, JOB), [f"learning_rate={written}"]).job.learning_rate == 1e-5


def test_an_override_reaches_inside(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, JOB + "lora:\n  rank: 4\n"), ["lora.rank=8", "lora.targets=[q_proj]"]).job
    assert (job.lora.rank, job.lora.targets) == (8, ("q_proj",))


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("learning_rat: 1e-5", [], r'job\.yaml:3:1: unknown key "learning_rat"; did you mean "learning_rate"\?'),
        ("per_device_train_batch_size: 2", [], 'did you mean "micro_batch"'),  # another tool's word
        ("model: other/model", [], r"job\.yaml:3:1: .*duplicate"),
        ("env:\n  A:", [], r"job\.yaml:4:3: A is null"),
        ("", ["seq_len=0"], "--set seq_len: seq_len is 0"),
        ("", ["learning_rate"], "is not key=value"),
        ("", ["monitor.name=2024-13-45"], r"--set monitor\.name.*: 2024-13-45 is not a valid timestamp"),
    ],
)
def test_a_mistake_is_named_with_its_line_or_option(tmp_path: Path, text: str, overrides: list[str], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        read_job(write(tmp_path, f"{JOB}{text}\n"), overrides)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    for text, count in (
        (f"{JOB}seq_len: 0\nmethod: lara\nfoo: 1\n", 3),
        (f"model: {'m' * 300}\noutput_dir: ~nobodyx/o", 2),
    ):
        with pytest.raises(InvalidConfig) as caught:
            read_job(write(tmp_path, text))
        assert len(caught.value.problem.splitlines()) == count


def test_paths_are_relative_to_the_job_and_a_hub_id_is_left_alone(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, JOB + "data: train.jsonl\n"), ["resume=nowhere"]).job
    assert (job.model, job.data) == ("org/model", str(tmp_path / "train.jsonl"))
    assert (job.output_dir, job.resume) == (str(tmp_path / "out"), str(tmp_path / "nowhere"))


def test_a_chat_template_is_a_file_beside_the_job_or_the_template_itself(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}\n")
    for text in ("chat.jinja", str(tmp_path / "chat.jinja"), '"{{ messages }}\\n"'):
        (tmp_path / "job.yaml").write_text(f"model: m\noutput_dir: o\nchat_template: {text}\n")
        assert read_job(tmp_path / "job.yaml").job.chat_template == "{{ messages }}\n"
    (tmp_path / "job.yaml").write_text("model: m\noutput_dir: o\nchat_template: chat.jinj\n")
    with pytest.raises(InvalidConfig, match=r'job\.yaml:3:1: chat_template "chat\.jinj": no such file'):
        read_job(tmp_path / "job.yaml")


@pytest.mark.parametrize("text", ["", "[1]", "a: [1\n", "\tmodel: x"])
def test_what_is_no_job_is_refused_with_the_files_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"job\.yaml"):
        read_job(write(tmp_path, text))


def test_every_example_job_is_a_job() -> None:
    paths = {path.name: path for path in shipped("launch").glob("*.job.yaml")}
    assert set(paths) >= {"full.job.yaml", "lora.job.yaml"}
    assert all(read_job(path).job.data is not None for path in paths.values())


@pytest.mark.parametrize(
    "line",
    [
        "learning_rate: .inf",
        "learning_rate: .nan",
        "learning_rate: 1e999",
        "weight_decay: .inf",
        "num_train_epochs: .inf",
        "adam_beta2: 1.0",
        "seed: -1",
        "seed: 4294967296",
        "monitor: {mode: onlin}",
        "monitor: {sinks: [swanlb]}",
        "lr_scheduler_type: cosin",
        "lr_scheduler_type: reduce_lr_on_plateau",
    ],
)
def test_what_would_fail_in_the_ranks_fails_at_reading(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidConfig, match=r"job\.yaml:3:"):
        read_job(write(tmp_path, JOB + line + "\n"))


def test_choices_are_those_of_the_code_that_takes_them() -> None:
    from transformers.trainer_utils import SchedulerType

    need_more_than_a_job_has = {
        "reduce_lr_on_plateau",
        "greedy",
    }
    assert {str(word) for word in Schedule} == {str(kind.value) for kind in SchedulerType} - need_more_than_a_job_has
    assert [str(word) for word in SinkName] == list(SINKS)


@pytest.mark.parametrize(
    ("written", "text"),
    [("4", "4"), ("true", "true"), ("3.10", "3.10"), ("2024-13-45", "2024-13-45"), ("^mlx=*", "^mlx=*"), ("'4'", "4")],
)
def test_an_environment_variable_from_an_option_is_text(tmp_path: Path, written: str, text: str) -> None:
    assert read_job(write(tmp_path, JOB), [f"env.A={written}"]).job.env == {"A": text}


def test_environment_variables_in_the_file_are_text(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, JOB + "env:\n  OMP_NUM_THREADS: 4\n  DEBUG: true\n"), ["env.C=1"]).job
    assert job.env == {"OMP_NUM_THREADS": "4", "DEBUG": "true", "C": "1"}


@pytest.mark.parametrize("key", ["model", "data", "ds_config", "hostfile", "resume"])
@pytest.mark.parametrize("name", ["~nobodyx/out", "x" * 300, "a\\0b", "loop/x"])
def test_a_path_that_cannot_be_one_is_refused_with_its_line(tmp_path: Path, key: str, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidConfig, match=rf"job\.yaml:2:1: {key} is "):
        read_job(write(tmp_path, f'output_dir: out\n{key}: "{name}"\n' + ("" if key == "model" else "model: m\n")))


def test_a_path_below_a_folder_that_may_not_be_entered_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Path.stat

    def stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if tmp_path / "locked" in path.parents:  # root may enter every folder
            raise PermissionError(13, "Permission denied")
        return look(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(InvalidConfig, match=r'job\.yaml:3:1: data is "locked/train.jsonl"; permission denied'):
        read_job(write(tmp_path, JOB + "data: locked/train.jsonl\n"))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a: 1\n\tb: 2\n", "Replace the tab by spaces."),
        ("a: 1\na: 2\n", "Remove one of the two lines."),
        ("a: 1\n---\nb: 2\n", "Keep one document"),
        ("a: 1\x00\n", "Save the file as plain text"),
        ("<<<<<<< HEAD\na: 1\n=======\na: 2\n>>>>>>> theirs\n", "Finish the merge"),
        ("a: [1\n", "A line is `key: value`"),
    ],
)
def test_a_text_that_is_no_yaml_is_refused_with_a_way_out(text: str, hint: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_yaml(text, "job.yaml")
    assert str(caught.value.hint).startswith(hint)
    assert caught.value.problem.startswith("job.yaml:")


@pytest.mark.parametrize(("text", "hint"), [("", "Write {}"), ("{\n<<<<<<< HEAD\n", "Finish the merge")])
def test_a_text_that_is_no_json_is_refused_with_a_way_out(text: str, hint: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        jsonc.parse(text, "ds_config.json")
    assert str(caught.value.hint).startswith(hint)


def _adapter(folder: Path, **config: Any) -> Path:
    """Writes what PEFT says of an adapter."""
    plain = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["layers.0.q_proj"]}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    return folder


def test_the_shape_of_an_adapter_to_continue_from_is_its_own(tmp_path: Path) -> None:
    _adapter(tmp_path / "saved", modules_to_save=["model.embed_tokens", "embed_tokens"])
    lora = read_job(write(tmp_path, JOB + "method: lora\nadapter: saved\n")).job.lora
    assert lora == Lora(rank=8, alpha=16, dropout=0.1, targets=("q_proj",), modules_to_save=("embed_tokens",))
    more = "method: lora\nadapter: saved\nlora: {dropout: 0, targets: [all-linear]}\n"
    lora = read_job(write(tmp_path, JOB + more)).job.lora
    assert (lora.dropout, lora.targets) == (0, ("q_proj",))
    names = [f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(2)]
    _adapter(tmp_path / "experts", target_parameters=names, target_modules=[], lora_dropout=0.0)
    for of_job in ("experts", "mlp.experts.down_proj"):
        lines = f"method: lora\nadapter: experts\nlora: {{target_parameters: [{of_job}]}}\n"
        lora = read_job(write(tmp_path, JOB + lines)).job.lora
        assert (lora.targets, lora.target_parameters) == ((), ("mlp.experts.down_proj",))


@pytest.mark.parametrize(
    ("lines", "config", "problem"),
    [
        ("method: lora\nlora: {rank: 4, alpha: 16}", {}, "has rank 8; lora in the job has rank 4"),
        ("method: lora\nlora: {targets: [v_proj]}", {}, r"has targets \[q_proj\]; lora in the job has targets"),
        ("method: lora\nlora: {target_parameters: [experts]}", {}, r"has target_parameters \[\]; lora in the job has"),
        ("method: lora", {"use_dora": True}, "has use_dora true, which dstrain does not train"),
        ("method: lora", {"target_modules": ".*q_proj"}, "has target_modules"),
        ("method: full", {}, "adapter is given, but method is full"),
    ],
)
def test_an_adapter_that_the_job_cannot_continue_is_named(
    tmp_path: Path, lines: str, config: dict[str, Any], problem: str
) -> None:
    _adapter(tmp_path / "saved", **config)
    with pytest.raises(InvalidConfig, match=rf"job\.yaml:3:1: .*{problem}"):
        read_job(write(tmp_path, f"{JOB}adapter: saved\n{lines}\n"))


@pytest.mark.parametrize("key", ["freeze", "train_only"])
def test_a_pattern_that_is_no_regular_expression_is_named_with_its_place(tmp_path: Path, key: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: m\noutput_dir: out\n{key}:\n  - mlp\n  - layers.(\n")
    with pytest.raises(InvalidConfig, match=r'job.yaml:5:5: "layers.\(" is no regular expression: missing \)'):
        read_job(path)


def test_a_key_of_an_empty_section_is_placed_at_its_section(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: m\noutput_dir: o\nsamples: {}\n")
    file = read_job(tmp_path / "job.yaml")
    assert file.locate(("samples", "max_new_tokens")).line == 3
