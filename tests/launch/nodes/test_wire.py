"""What run and the agents say to each other survives the way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dstrain.launch.nodes.agent import node_number
from dstrain.launch.nodes.wire import Died, End, Lines, Wrote, decode, encode


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


def test_a_shells_greeting_is_no_message() -> None:
    for line in (b"Welcome to Ubuntu", b"{}", b'{"dstrain": "Nothing", "node": 0, "body": {}}', b"[1]", b"\xff", b"7"):
        assert decode(line) is None


def test_an_order_may_be_for_everyone() -> None:
    assert decode(encode(End(grace_s=1.5))) == (None, End(grace_s=1.5))


def test_a_death_that_nobody_saw_has_no_code() -> None:
    assert decode(encode(Died(rank=3, code=None), 1)) == (1, Died(rank=3, code=None))


def test_under_slurm_a_node_knows_its_number_by_its_name() -> None:
    assert node_number("n1=0,n7=1", {"SLURMD_NODENAME": "n7"}) == 1
