"""Where the ranks of a run that stands still are."""

from __future__ import annotations

from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.heartbeat import Phase
from dstrain.launch.failure.outcome import Hang, Start, hang_lines, main_stack, start_line

HOSTS = Hosts(hosts=(Host(name="gpu01", slots=2), Host(name="gpu02", slots=1)), name="hostfile")


def dump(innermost: str) -> str:
    """Returns what faulthandler writes at a signal, as it was seen on Python 3.11."""
    return f"""step 7/100, loss 2.5
Thread 0x00007f44d9e006c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f4579c0a740 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 10 in {innermost}
  File "/venv/dstrain/train/__main__.py", line 99 in main
  File "<frozen runpy>", line 88 in _run_code
  File "/venv/dstrain/train/__main__.py", line 212 in <module>
  File "<frozen runpy>", line 198 in _run_module_as_main
"""


def test_the_main_threads_stack_is_found_among_the_others() -> None:
    stack = main_stack(dump("all_reduce"))
    assert stack[0].endswith("line 10 in all_reduce")
    assert len(stack) == 5


def test_of_two_dumps_the_last_one_counts() -> None:
    assert main_stack(dump("old") + dump("new"))[0].endswith("in new")


def test_the_rank_that_is_behind_is_named_and_shown() -> None:
    hang = Hang(seconds=312, median_s=4.2, steps={0: 8, 1: 8, 2: 7})
    texts = {0: dump("all_reduce"), 1: dump("all_reduce"), 2: dump("read")}
    lines, shown = hang_lines(hang, texts, HOSTS)
    assert lines[0] == "no step for 5 min 12 s (median 4.2 s): the run hangs"
    assert lines[1] == "rank 2 on gpu02 did 7 steps, the others 8"
    assert lines[2].startswith("rank 2 on gpu02 in read (")
    assert lines[3].startswith("ranks 0, 1 on gpu01 in all_reduce (")
    assert (shown, lines[4]) == (2, "rank 2:")


def test_a_rank_without_a_stack_is_told_as_such() -> None:
    hang = Hang(seconds=70, median_s=1, steps={0: 3, 1: 3, 2: 3})
    lines, shown = hang_lines(hang, {0: dump("all_reduce"), 1: dump("all_reduce"), 2: ""}, HOSTS)
    assert lines[1] == "rank 2 on gpu02 in an unknown place: it wrote no stack"
    assert shown == 2


def test_a_start_is_told_with_those_that_are_behind_first() -> None:
    start = Start(seconds=45, phases={0: Phase.LOADING, 1: Phase.CONNECTING, 2: None})
    assert start_line(start, HOSTS) == (
        "starting for 45 s: 1 of 3 ranks connected; rank 2 on gpu02 not reporting;"
        " rank 1 on gpu01 waiting for the others; rank 0 on gpu01 connected, loading or in the first step"
    )


def test_a_start_that_took_too_long_shows_the_rank_that_is_behind() -> None:
    start = Start(seconds=1800, phases={0: Phase.CONNECTING, 1: Phase.CONNECTING, 2: Phase.START})
    hang = Hang(seconds=1800, median_s=0.0, steps={0: 0, 1: 0, 2: 0}, start=start)
    lines, shown = hang_lines(hang, {0: dump("wait"), 1: dump("wait"), 2: "slow file system\n"}, HOSTS)
    assert lines[0] == "the start made no progress for 30 min 0 s (--start-timeout)"
    assert shown == 2
    assert lines[-3:-1] == ["rank 2:", "slow file system"]
