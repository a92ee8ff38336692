"""What a rank's window holds beside computation: time between steps, checkpoints, a device that waits for the host."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from dstrain.monitor.collectives import Collectives
from dstrain.monitor.comparison import Part, step_parts
from dstrain.monitor.meter import COUNTS, Counts, Meter
from dstrain.monitor.metrics import summarize


def test_a_checkpoint_in_a_window_leaves_it_as_it_was_and_its_time_counts_apart() -> None:
    meter = Meter()
    meter.count({COUNTS: Counts(7)})
    with meter.forward(7):
        pass
    meter.end_step()
    with meter.aside():
        meter.count({COUNTS: Counts(1000)})  # of an evaluation
        with meter.forward(1000):
            time.sleep(0.2)
    meter.begin_step()
    meter.count({COUNTS: Counts(5)})
    reading = meter.close()
    assert (reading.tokens, reading.aside_s >= 0.2) == (12, True)
    assert max(reading.window_s, reading.own_s, reading.host_s, reading.other_s, reading.forward_s) < 0.2
    metrics = summarize([reading], steps=2, against=None)
    assert metrics["aside_s"] == reading.aside_s
    assert "aside_s" not in summarize([meter.close()], steps=1, against=None)


def test_what_happens_between_steps_is_neither_computation_nor_waiting_for_the_host() -> None:
    meter = Meter()
    meter.end_step()
    time.sleep(0.1)
    meter.begin_step()
    reading = meter.close()
    assert reading.other_s >= 0.1
    assert reading.host_s <= reading.window_s - 0.1


def test_a_process_that_neither_computes_nor_waits_for_others_lets_its_device_wait() -> None:
    meter = Meter()
    time.sleep(0.1)
    idle = meter.close()
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    busy = meter.close()
    assert idle.host_s >= 0.09
    assert busy.host_s <= busy.window_s - 0.1
    loaded = meter.timed(iter([0]))
    next(loaded)
    assert meter.close().host_s < 0.09


def test_kernels_that_are_done_before_the_next_are_launched_wait_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = time.perf_counter()

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Event) -> float:
            return 1000 * (other.at - self.at)

    class Stream:
        done = True

        def query(self) -> bool:
            return self.done

    stream = Stream()
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: stream)
    meter = Meter(Collectives(on_gpu=True))
    for done in (True, False):
        stream.done = done
        with meter.forward(8):
            time.sleep(0.05)
    assert 0.05 <= meter.close().host_s < 0.1


def test_a_step_is_split_as_the_rank_sees_it_that_enters_collectives_last() -> None:
    window = {
        "step_s": 1.0,
        "data_wait_share": 0.1,
        "comm_s_by_rank": [0.3, 0.1],
        "other_s_by_rank": [0.4, 0.05],
        "host_s_by_rank": [0.0, 0.2],
    }
    windows = [{"step": n, **window} for n in (1, 2, 3)]
    run: Any = SimpleNamespace(estimate=None, cluster=None, windows=windows, states=())
    assert {one.part: pytest.approx(one.measured) for one in step_parts(run)} == {
        Part.DATA_WAIT: 0.1,
        Part.COMMUNICATION: 0.1,
        Part.SLOWER_RANKS: 0.1,
        Part.OTHER: 0.05,
        Part.HOST: 0.2,
        Part.COMPUTATION: 0.45,
    }
