"""Hostfiles: what is accepted means what it means to DeepSpeed; what is refused says what to type."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.hostfile import Host, Hosts, expand, parse, placeholders, render
from dstrain.paths import shipped


def problems(text: str) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        parse(text, "hostfile")
    return caught.value.problem.split("\n")


def problem_of_hosts(text: str, slots: int | None = 8) -> str:
    with pytest.raises(InvalidConfig) as caught:
        expand(text, slots)
    return caught.value.problem


def test_hosts_keep_their_order_and_their_lines() -> None:
    hosts = parse("# head\n\ngpu02 slots=8\n  user@gpu01\tslots=4  \n", "hostfile")
    assert hosts == Hosts(
        hosts=(Host(name="gpu02", slots=8, line=3), Host(name="user@gpu01", slots=4, line=4)), name="hostfile"
    )
    assert hosts.num_slots == 12


@pytest.mark.parametrize("text", ["a slots=8\r\nb slots=8\r\n", "a slots=8\rb slots=8", "a slots=8\nb slots=8"])
def test_line_ends_of_every_system_are_the_same(text: str) -> None:
    assert [host.line for host in parse(text, "hostfile").hosts] == [1, 2]


def test_names_and_addresses_are_taken() -> None:
    names = ["gpu01", "10.0.0.1", "node-1.example.org", "user@node_1", "fe80::1", "::1", "CHANGE-ME-1"]
    assert [host.name for host in parse("".join(f"{name} slots=8\n" for name in names), "hostfile").hosts] == names


@pytest.mark.parametrize(
    ("line", "place", "fix"),
    [
        ("w", "1:2", "`w slots=8`"),
        ("w:8", "1:2", "`w slots=8`"),
        ("w,8", "1:2", "`w slots=8`"),
        ("w=8", "1:2", "`w slots=8`"),
        ("w 8", "1:3", "`w slots=8`"),
        ("w slots = 8", "1:3", "`w slots=8`"),
        ("w slots= 8", "1:3", "`w slots=8`"),
        ("w SLOTS=8", "1:3", "`w slots=8`"),
        ("w slot=8", "1:3", "`w slots=8`"),
        ("w gpu=8", "1:3", "`w slots=8`"),
        ("w\tgpus=8", "1:3", "`w slots=8`"),
        ("w slots:8", "1:3", "`w slots=8`"),
        ("w slots=", "1:3", "the number of slots is missing; write `w slots=8`"),
        ("w slots=eight", "1:3", "`eight` is not a whole number"),
        ("w slots=-1", "1:3", "`-1` is not a whole number"),
        ("w slots=4abc", "1:3", "`4abc` is not a whole number; write `w slots=4`"),
        ("w slots=8.5", "1:3", "`8.5` is not a whole number; write `w slots=8`"),
        ("w slots=0", "1:9", "has no slots; remove the line"),
        ("w slots=9999", "1:9", "slots=9999 is more than any node has"),
        ("w slots=99999999999", "1:9", "more than any node has; write `w slots=8`"),
        ("w slots=8 max_slots=8", "1:11", "`max_slots=8` follows the number; write `w slots=8`"),
        ("  w slots=8  # the first", "1:14", "a comment needs a line of its own; write `w slots=8`"),
        ("w gpu=1 slots=8", "1:3", "`w slots=8`"),
        ("slots=8", "1:1", "the host before `slots=8` is missing; write `HOST slots=8`"),
        ("w:8 slots=8", "1:1", "write `w slots=8`"),
        ("a;b slots=8", "1:1", '"a;b" is not a host name'),
        ("$(id) slots=8", "1:1", "is not a host name"),
        ("-oProxyCommand=x slots=8", "1:1", "is not a host name"),
        ("ä slots=8", "1:1", "is not a host name"),
        ("w slots=٨", "1:3", "not a whole number"),
    ],
)
def test_a_bad_line_says_where_and_what_to_type(line: str, place: str, fix: str) -> None:
    (problem,) = problems(line)
    assert problem.startswith(f"hostfile:{place}: ")
    assert fix in problem


@pytest.mark.parametrize(
    ("line", "advised"),
    [
        ("n1 slots=0,1,2,3", "n1 slots=4"),
        ("n1 slots=0-7", "n1 slots=8"),
        ("n1 slots=0-1,4", "n1 slots=3"),
        ("n1 slots=0 # none", "n1 slots=8"),
        ("n1 slots=9999 gpus", "n1 slots=8"),
        ("n1 gpus=0", "n1 slots=8"),
        ("n1:0", "n1 slots=8"),
        ("n1:22 slots=4", "n1 slots=4"),
        ("n1: slots=0,1", "n1 slots=2"),
        ("n1:22 gpus=2", "n1 slots=2"),
        ("n1,n2", None),
        ("gpu[01-02] slots=8", None),
        ("n1;", "n1 slots=8"),
        ("n1 slots=4,", "n1 slots=4"),
        ("n1 slots=08", None),
    ],
)
def test_the_line_that_a_message_advises_is_taken(line: str, advised: str | None) -> None:
    try:
        parse(f"{line}\n", "hostfile")
        return
    except InvalidConfig as error:
        problem = error.problem
    lines = re.findall(r"write `([^`]+)`", problem)
    assert all(parse(f"{one}\n", "hostfile").hosts for one in lines), problem
    assert advised is None or advised in lines, problem
    for names in re.findall(r"dstrain hostfile write '([^']+)'", problem):
        assert expand(names, None).hosts


@pytest.mark.parametrize(
    "names", ["n1:", "n1", "gpu[10-08]:4", "gpu[2-1]:4", "n1:0", "n1;:4", "gpu[1-016]:2", "n1:9999"]
)
def test_the_names_that_a_message_advises_are_taken(names: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        expand(names, None)
    advised = re.findall(r'write "?([^";]+?)"?(?: if|$)', raised.value.problem, re.MULTILINE)
    assert advised, raised.value.problem
    for one in advised:
        assert expand(one if not one.startswith("[") else f"gpu{one}:4", None).hosts


def test_the_problems_of_the_whole_file_come_together() -> None:
    found = problems("\ufeffa slots=8\nb\n# fine\na slots=8\nc slots=0\n")
    assert [problem.split(" ")[0] for problem in found] == [
        "hostfile:1:1:",
        "hostfile:2:2:",
        "hostfile:4:1:",
        "hostfile:5:9:",
    ]
    assert "byte order mark" in found[0]
    assert '"a" is already on line 1' in found[2]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_a_file_without_hosts_is_refused(text: str) -> None:
    assert problems(text) == ["hostfile:1:1: names no host; write one line `HOST slots=8` for each node"]


LINES = [
    "worker-0 slots=8",
    "  worker-0 \t slots=16  ",
    "user@host slots=2",
    "fe80::1 slots=4",
    "# comment",
    "",
    "w slots=8 max_slots=8",
    "w slots=8 # x",
    "w slots=4abc",
    "w slots=0",
    "w",
    "w:8",
    "w slots = 8",
    "w SLOTS=8",
    "w gpu=1 slots=8",
    "\ufeffw slots=8",
    "w slots=٨",
    "w\u00a0slots=8",
    "w\x0bslots=8",
    "w slots=008",
    "slots=8 slots=8",
    "#w slots=8",
    "w#1 slots=8",
]


def deepspeed_pool(text: str) -> dict[str, int] | None:
    """Returns what DeepSpeed itself makes of a hostfile, or None where it refuses it."""
    from deepspeed.launcher.runner import _parse_hostfile  # type: ignore[import-untyped]

    try:
        return dict(_parse_hostfile(io.StringIO(text, newline=None).readlines()))
    except ValueError:
        return None


def our_pool(text: str) -> dict[str, int] | None:
    try:
        return {host.name: host.slots for host in parse(text, "hostfile").hosts}
    except InvalidConfig:
        return None


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("rest", ["", "\nother slots=8\n", "\nworker-0 slots=8"])
def test_what_we_accept_means_the_same_to_deepspeed(line: str, rest: str) -> None:
    ours = our_pool(line + rest)
    assert ours is None or ours == deepspeed_pool(line + rest)


WORDS = st.sampled_from(
    ["w", "gpu01", "#", "slots=8", "slots=", "slots=0", "=", "8", ":8", "slots=8x", "a@b", "::1", "\ufeff"]
)
GAPS = st.sampled_from([" ", "\t", "  ", "", "\n", "\r\n", "\u00a0"])


@settings(deadline=None)  # the first example imports deepspeed
@given(st.lists(st.tuples(WORDS, GAPS), max_size=12))
def test_no_text_means_something_else_to_deepspeed(words: list[tuple[str, str]]) -> None:
    text = "".join(word + gap for word, gap in words)
    ours = our_pool(text)
    assert ours is None or ours == deepspeed_pool(text)


@pytest.mark.sweep
@given(st.text(max_size=60))
def test_any_text_gives_hosts_or_problems_with_places(text: str) -> None:
    try:
        hosts = parse(text, "hostfile")
    except InvalidConfig as error:
        assert all(re.match(r"hostfile:\d+:\d+: ", line) for line in error.problem.split("\n"))
    else:
        assert hosts.num_slots > 0


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[01-03]", "gpu01 gpu02 gpu03"),
        ("gpu[8-11]", "gpu8 gpu9 gpu10 gpu11"),
        ("gpu[08-11]", "gpu08 gpu09 gpu10 gpu11"),
        ("gpu[1,4-5,09]", "gpu1 gpu4 gpu5 gpu09"),
        ("r[1-2]n[1-2].x", "r1n1.x r1n2.x r2n1.x r2n2.x"),
        ("10.0.0.1, 10.0.0.[2-3]", "10.0.0.1 10.0.0.2 10.0.0.3"),
        ("login,root@gpu[1-2]", "login root@gpu1 root@gpu2"),
    ],
)
def test_ranges_are_written_out(text: str, names: str) -> None:
    hosts = expand(text, 8)
    assert " ".join(host.name for host in hosts.hosts) == names
    assert {host.slots for host in hosts.hosts} == {8}
    own = expand(f"{text}:4,big", 8)
    assert [host.slots for host in own.hosts][-2:] == [4, 8], "slots of an item win"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gpu[16-01]", 'the range "[16-01]" is descending; write [01-16]'),
        ("gpu[1-]", '"[1-]" is not a range'),
        ("gpu[]", '"[]" is not a range'),
        ("gpu[a-b]", '"[a-b]" is not a range'),
        ("gpu[1-016]", 'the range "[1-016]" has inconsistent leading zeros; write [001-016]'),
        ("gpu[0-999999999]", "is longer than 4096 hosts"),
        ("gpu[1-100]x[1-100]", "more than 4096 hosts"),
        ("gpu[1-2", '"gpu[1-2" has an unmatched bracket'),
        ("gpu1-2]", "unmatched bracket"),
        ("gpu1,,gpu2", "a name is missing between two commas"),
        ("", "a name is missing"),
        ("gpu1,gpu1", '"gpu1" appears twice'),
        ("gpu[1-2,2]", '"gpu2" appears twice'),
        ("gpu1:0", "0 is not a number of GPUs"),
        ("gpu1:x", "is not a host name"),
        ("a b", "is not a host name"),
        ("a;reboot", "is not a host name"),
    ],
)
def test_a_bad_list_is_named(text: str, problem: str) -> None:
    assert problem in problem_of_hosts(text)


def test_the_problems_of_a_list_come_together() -> None:
    assert problem_of_hosts("gpu[2-1],x[").count("\n") == 1
    assert problem_of_hosts("gpu1", None) == '--hosts: "gpu1" has no slots; write "gpu1:8" if it has 8 GPUs'


@given(st.text(alphabet="ab01-[],:. ", max_size=20))
def test_any_list_gives_hosts_or_a_problem(text: str) -> None:
    try:
        hosts = expand(text, 8)
    except InvalidConfig:
        return
    assert parse(render(hosts), "hostfile").num_slots == hosts.num_slots


def test_what_is_rendered_parses_back() -> None:
    hosts = expand("gpu[01-16]:8", None)
    assert our_pool(render(hosts)) == {host.name: host.slots for host in hosts.hosts} == deepspeed_pool(render(hosts))


def test_placeholders_know_their_lines() -> None:
    hosts = placeholders(2, 8)
    text = "# fill in\n" + render(hosts)
    assert hosts.placeholder_lines == (1, 2)
    assert parse(text, "hostfile").placeholder_lines == (2, 3)
    assert parse("gpu1 slots=8\n", "hostfile").placeholder_lines == ()


EXAMPLES = sorted(shipped("hostfiles").glob("*.hostfile"))


def test_every_example_is_good() -> None:
    assert {path.name for path in EXAMPLES} >= {"one-node.hostfile", "two-nodes.hostfile"}
    for path in EXAMPLES:
        text = path.read_text(encoding="utf-8")
        assert our_pool(text) == deepspeed_pool(text), path.name
