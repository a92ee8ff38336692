"""What is counted in a micro-batch, and what the callback writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState

from dstrain.monitor.callback import MetricsCallback
from dstrain.monitor.health.history import Facts
from dstrain.monitor.health.rules import Watch
from dstrain.monitor.meter import COUNTS, CountingCollator, Counts, Meter, RunQueue
from dstrain.monitor.metrics import JsonlFile


def count(batch: dict[str, Any]) -> Counts:
    counts: Counts = CountingCollator(lambda rows: batch)(None)[COUNTS]
    return counts


def test_the_attention_mask_tells_padding_apart() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "attention_mask": mask}
    assert count(batch) == Counts(tokens=4, padding=4, squared=9 + 1, samples=(3, 1))


def test_packed_samples_begin_at_position_0_and_filling_has_no_label() -> None:
    batch = {
        "input_ids": torch.zeros(1, 8, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]]),
        "labels": torch.tensor([[-100, 5, 6, -100, 7, -100, -100, -100]]),
    }
    assert count(batch) == Counts(tokens=5, padding=3, squared=9 + 4, samples=(3, 2), targets=3)


def test_the_counts_of_a_window_are_summed_and_the_next_one_begins_anew() -> None:
    meter = Meter()
    meter.count({COUNTS: Counts(3, 1, 9, (3,))})
    meter.count({COUNTS: Counts(1, 0, 7, (1,))})
    reading = meter.close()
    assert (reading.tokens, reading.padding, reading.squared_tokens) == (4, 1, 16)
    assert meter.close().tokens == 0


def test_time_in_the_data_loader_is_waiting() -> None:
    import time

    def slow() -> Any:
        time.sleep(0.05)
        yield 1

    meter = Meter()
    assert list(meter.timed(slow())) == [1]
    assert 0.05 <= meter.close().wait_s < 1


def callback(folder: Path, said: list[str]) -> MetricsCallback:
    return MetricsCallback(
        Meter(),
        group=None,
        against=None,
        metrics=JsonlFile(folder / "metrics.jsonl"),
        health=JsonlFile(folder / "health.jsonl"),
        watch=Watch({}, Facts()),
        sinks=[],
        say=said.append,
    )


def log(watcher: MetricsCallback, step: int, **logs: Any) -> None:
    state = TrainerState(global_step=step, max_steps=10)
    arguments: Any = None
    watcher.on_log(arguments, state, TrainerControl(), logs=logs)


def test_an_ill_loss_is_in_health_each_time_and_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    watcher = callback(tmp_path, said)
    arguments: Any = None
    watcher.on_train_begin(arguments, TrainerState(max_steps=10), TrainerControl())
    log(watcher, 1, loss=float("nan"))
    log(watcher, 2, loss=float("nan"))
    assert len([line for line in said if line.startswith("WARNING")]) == 1
    assert len((tmp_path / "health.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["loss"] is None


def test_a_metrics_file_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    said: list[str] = []
    watcher = callback(tmp_path / "missing", said)
    arguments: Any = None
    watcher.on_train_begin(arguments, TrainerState(max_steps=10), TrainerControl())
    log(watcher, 1, loss=1.0)
    log(watcher, 2, loss=1.0)
    assert len([line for line in said if "cannot be written" in line]) == 1


def test_a_progress_line_says_step_loss_and_what_is_left(tmp_path: Path) -> None:
    said: list[str] = []
    watcher = callback(tmp_path, said)
    arguments: Any = None
    watcher.on_train_begin(arguments, TrainerState(max_steps=10), TrainerControl())
    log(watcher, 5, loss=1.25, learning_rate=1e-5, tokens_per_s=12345.0, mfu=0.41)
    assert said[0].startswith("step 5/10, loss 1.2500, learning rate 1.00e-05, 12,345 tokens/s, MFU 41%, 0:00 left")


@pytest.mark.parametrize(
    ("ranks", "loss", "told"),
    [
        ({}, 1.5, "differs by 25.0% from that of the same steps before"),
        ({"ranks": 2, "from_ranks": 2}, 1.99, "of the same steps before"),
        ({"ranks": 1, "from_ranks": 2}, 1.99, None),  # another number does not repeat losses exactly
    ],
)
def test_a_resumed_run_compares_its_first_loss_with_the_same_steps_before(
    tmp_path: Path, ranks: dict[str, int], loss: float, told: str | None
) -> None:
    said: list[str] = []
    watcher = callback(tmp_path, said)
    before = [{"step": step, "loss": 2.0} for step in (1, 2, 3)]
    records = [*before, {"event": "resume", "from_step": 2, **ranks}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    arguments: Any = None
    watcher.on_train_begin(arguments, TrainerState(max_steps=10, global_step=2), TrainerControl())
    log(watcher, 3, loss=loss)
    assert any((told or "of the same steps before") in line for line in said) is (told is not None)


def test_forward_passes_are_timed_and_the_slowest_does_not_count() -> None:
    import time

    meter = Meter()
    for seconds in (0.02, 0.02, 0.02, 0.1):
        with meter.forward(10):
            time.sleep(seconds)
    assert 0.002 <= meter.close().forward_s_per_token < 0.01
    assert math.isnan(meter.close().forward_s_per_token)


def test_what_a_rank_did_alone_does_not_count_as_its_own_work() -> None:
    import time

    meter = Meter()
    time.sleep(0.05)
    meter.pause(0.04)
    reading = meter.close()
    assert 0.0 < reading.own_s < reading.window_s - 0.03


def test_samples_without_any_label_are_counted_but_padding_is_not() -> None:
    labels = torch.tensor([[-100, 5, 6], [-100, -100, -100]])
    padded = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "labels": labels}
    assert count(padded).masked == 1
    packed = {
        "input_ids": torch.zeros(1, 7, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 0, 1, 2, 0, 1]]),
        "labels": torch.tensor([[-100, -100, -100, 6, 7, -100, -100]]),
    }
    assert (count(packed).masked, count(packed).samples) == (1, (2, 3))


def test_what_a_busy_thread_does_not_run_it_waits_for_a_cpu() -> None:
    import time

    queue = RunQueue()
    began, waited, ran = time.perf_counter(), queue.wait_s(), time.thread_time()
    while time.perf_counter() - began < 0.1:
        pass
    wall, waited, ran = time.perf_counter() - began, queue.wait_s() - waited, time.thread_time() - ran
    assert abs(wall - ran - waited) < 0.03
