"""What run and the agents say to each other survives the way."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrain.launch.nodes.agent import node_number
from dstrain.launch.nodes.protocol import (
    Alive,
    Died,
    End,
    Ended,
    Hello,
    Lines,
    Orphaned,
    Problem,
    Wrote,
    decode,
    encode,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=5,
)


@given(st.text(), st.integers(0, 99))
def test_any_text_arrives_as_it_was(text: str, node: int) -> None:
    sent = Wrote(name="logs/a.log", text=text, on_screen=True)
    line = encode(sent, node)
    assert line.count(b"\n") == 1
    assert decode(line) == (node, sent)


@given(st.lists(st.binary(max_size=40)), st.integers(1, 7))
def test_lines_come_out_whole_however_they_arrive(parts: list[bytes], size: int) -> None:
    whole = b"".join(part.replace(b"\n", b"") + b"\n" for part in parts)
    lines = Lines()
    found = [line for start in range(0, len(whole), size) for line in lines.feed(whole[start : start + size])]
    assert found == whole.split(b"\n")[:-1]


def test_a_line_without_end_is_left_out_and_takes_no_memory() -> None:
    lines = Lines(longest=8)
    assert lines.feed(b"12345678\n123456789\n1") == [b"12345678"]
    for _ in range(99):
        assert lines.feed(b"1" * 8) == []
    assert lines.feed(b"1\n\nab\n") == [b"", b"ab"]


ALIVE = b'{"dstrain": "Alive", "node": 0, "body": {"steps": %s}}'
WROTE = b'{"dstrain": "Wrote", "node": %s, "body": {"name": %s, "text": "", "on_screen": true, "is_whole": false}}'


@pytest.mark.parametrize(
    "line",
    [
        *(ALIVE % steps for steps in (b'{"1": [1]}', b'{"x": [1, "step", 2]}', b'{"1": [1e999, "step", 2]}', b"[]")),
        *(ALIVE % steps for steps in (b'{"1": [1, "step", -2]}', b'{"1": [1, "dancing", 2]}', b'{"1": 7}', b"7")),
        *(WROTE % words for words in ((b"0", b"7"), (b"[0]", b'"a"'), (b'"0"', b'"a"'), (b"0", b"null"))),
        b'{"dstrain": "Ended", "node": 0, "body": {"code": 0, "num_finished": 0, "num_done": 0, "reported": [1]}}',
        b'{"dstrain": [], "node": 0, "body": {}}',
        b"[" * 100_000,
        b'{"dstrain": ' * 10_000,
        b'{"dstrain": "Died", "node": 1, "body": {"rank": ' + b"9" * 5000 + b', "code": null}}',
    ],
)
def test_what_no_agent_says_is_no_message(line: bytes) -> None:
    assert decode(line) is None


@given(st.binary() | st.text().map(str.encode) | JSON.map(lambda value: json.dumps(value).encode()), st.binary())
def test_no_bytes_raise(line: bytes, more: bytes) -> None:
    for piece in Lines().feed(line + b"\n" + more):
        decode(piece)


KIND = st.sampled_from([Alive, Died, Ended, Hello, Orphaned, Problem, Wrote])


@pytest.mark.sweep
@given(KIND.flatmap(lambda kind: st.tuples(st.just(kind), st.fixed_dictionaries({f.name: JSON for f in fields(kind)}))))
def test_a_message_has_the_types_of_its_fields(message: tuple[type, dict[str, Any]]) -> None:
    kind, body = message
    found = decode(json.dumps({"dstrain": kind.__name__, "node": 0, "body": body}).encode())
    if found is not None and isinstance(found[1], Died):
        assert type(found[1].rank) is int
    if found is not None and isinstance(found[1], Wrote):
        assert type(found[1].name) is type(found[1].text) is str


def test_a_shells_greeting_is_no_message() -> None:
    for line in (b"Welcome to Ubuntu", b"{}", b'{"dstrain": "Nothing", "node": 0, "body": {}}', b"[1]", b"\xff", b"7"):
        assert decode(line) is None


def test_an_order_may_be_for_everyone() -> None:
    assert decode(encode(End(grace_s=1.5))) == (None, End(grace_s=1.5))


def test_a_death_that_nobody_saw_has_no_code() -> None:
    assert decode(encode(Died(rank=3, code=None), 1)) == (1, Died(rank=3, code=None))


def test_under_slurm_a_node_knows_its_number_by_its_name() -> None:
    assert node_number("n1=0,n7=1", {"SLURMD_NODENAME": "n7"}) == 1
