"""Parses hostfiles in DeepSpeed's format, and host ranges such as `gpu[01-16]`.

A line is `HOST slots=N`, blank, or a comment that starts with `#`. DeepSpeed ignores text after the number, makes a
byte order mark part of the name and accepts hosts with 0 slots; these are errors here, and every accepted file means
the same to DeepSpeed. Source: deepspeed 0.19.8 launcher/runner.py: _parse_hostfile
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import NamedTuple

from dstrain.errors import InvalidConfig, Place

PLACEHOLDER = "CHANGE-ME"
"""Prefix of placeholders for host names."""

MAX_SLOTS = 1024
"""Largest plausible number of slots of a host."""

MAX_HOSTS = 4096
"""Largest plausible number of hosts in a range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One line of a hostfile."""

    name: str
    """Host name or address, possibly with `user@`."""
    slots: int
    """Number of GPUs to use."""
    line: int | None = None
    """Line of the hostfile, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a run, in order."""

    hosts: tuple[Host, ...]
    """At least one."""
    name: str
    """The file or option they come from."""

    @property
    def num_slots(self) -> int:
        """GPUs on all hosts together."""
        return sum(host.slots for host in self.hosts)

    def of_rank(self, rank: int) -> str:
        """Returns the host of a rank; the launcher numbers ranks by host, in this order."""
        for host in self.hosts:
            if rank < host.slots:
                return host.name
            rank -= host.slots
        return self.hosts[-1].name

    @property
    def placeholder_lines(self) -> tuple[int, ...]:
        """Lines whose host is a placeholder."""
        numbered = enumerate(self.hosts, start=1)
        return tuple(host.line or order for order, host in numbered if host.name.startswith(PLACEHOLDER))


def parse(text: str, name: str) -> Hosts:
    """Returns the hosts of a hostfile's text; `name` is the file's, for messages.

    Raises InvalidConfig with every problem of the file, one per line, each with file:line:column and a fix.

    >>> [host.slots for host in parse("# two nodes\\ngpu01 slots=8\\ngpu02 slots=8\\n", "hostfile").hosts]
    [8, 8]
    """
    problems: list[InvalidConfig] = []
    start = Place(file=name, line=1, column=1)
    if text.startswith("\ufeff"):
        problem = "starts with a byte order mark, which would become part of the first host's name"
        problems.append(InvalidConfig(problem, hint='save it as "UTF-8 without BOM"', place=start))
        text = text[1:]
    hosts: dict[str, Host] = {}
    # DeepSpeed reads in text mode, whose lines end at these three alone; splitlines knows more
    for number, raw in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\S+)\s+slots=([0-9]+)", line)
        fault = _fault(line) if match is None else _entry_fault(match, hosts)
        if fault is not None:
            column = len(raw) - len(raw.lstrip()) + fault.column + 1
            place = Place(file=name, line=number, column=column)
            problems.append(InvalidConfig(fault.problem, hint=fault.fix, place=place))
        elif match is not None:
            hosts[match[1]] = Host(name=match[1], slots=int(match[2]), line=number)
    if not hosts and not problems:
        fix = "write one line `HOST slots=8` for each node"
        problems.append(InvalidConfig("names no host", hint=fix, place=start))
    if problems:
        raise InvalidConfig(
            "\n".join(f"{problem.problem}; {problem.hint}" for problem in problems),
            hint="Every line is `HOST slots=N`, a comment that starts with #, or blank.",
            parts=problems,
        )
    return Hosts(hosts=tuple(hosts.values()), name=name)


class _Fault(NamedTuple):
    """An error in a line or a host name."""

    problem: str
    fix: str
    column: int = 0
    """Offset in the line, from 0."""
    is_name: bool = False
    """Whether the fix is a host's name."""


def _entry_fault(match: re.Match[str], known: dict[str, Host]) -> _Fault | None:
    """Returns the error in a line of the form `HOST slots=N`, or None."""
    host, slots = match[1], int(match[2][:9])
    if (fault := _name_fault(host)) is not None:
        return _with_line(fault, match[2])
    if host in known:
        return _Fault(f'"{host}" is already on line {known[host].line}', "remove one of the two lines")
    fix = f"write `{host} slots=8` if it has 8"
    if slots == 0:
        return _Fault(f'"{host}" has no slots', f"remove the line, or {fix}", match.start(2))
    if slots > MAX_SLOTS:
        return _Fault(f"slots={match[2]} is more than any node has", f"{fix} GPUs", match.start(2))
    return None


def _plausible(slots: str) -> int:
    """Returns the number of slots that a text means: the length of a list of GPUs, or 8 if no host has such slots.

    >>> [_plausible(text) for text in ("4", "0,1,2,3", "0-3", "0-1,3", "0", "9999", "two")]
    [4, 4, 4, 3, 8, 8, 8]
    """
    if re.fullmatch(r"[0-9]{1,4}([-,][0-9]{1,4})+", slots):
        try:
            return len(set(map(int, _numbers(slots))))
        except InvalidConfig:  # a descending range
            return 8
    digits = re.match(r"[0-9]{1,9}", slots)
    return int(digits[0]) if digits and 0 < int(digits[0]) <= MAX_SLOTS else 8


def _with_line(fault: _Fault, slots: str) -> _Fault:
    """Returns the fault of a host's name with the line to write, if its name is known."""
    return fault._replace(fix=f"write `{fault.fix} slots={_plausible(slots)}`") if fault.is_name else fault


def _name_fault(host: str) -> _Fault | None:
    """Returns the error in a host name, or None; ssh and a shell read it, so special characters are refused.

    Its fix is the name that is meant, if it is known.
    """
    if re.fullmatch(r"([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*", host, re.ASCII):
        return None
    if re.fullmatch(r"(\w[\w.-]*@)?[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(%\w+)?", host, re.ASCII):
        return None
    if re.fullmatch(r"[\w.@-]+:\d+", host, re.ASCII):
        return _Fault(f'"{host}" has a number after its name', host.rpartition(":")[0], is_name=True)
    if re.fullmatch(r"[\w.@-]+[:,;]", host, re.ASCII):
        return _Fault(f'"{host}" ends with "{host[-1]}"', host[:-1], is_name=True)
    if re.fullmatch(r"[A-Za-z0-9_.,[\]-]*\[[0-9,-]+\][A-Za-z0-9_.,[\]-]*", host, re.ASCII):
        return _Fault(f'"{host}" is a range of hosts', f"write a line for each: dstrain hostfile write '{host}:8'")
    return _Fault(f'"{host}" is not a host name or address', "use letters, digits, dots and dashes")


def _fault(line: str) -> _Fault:
    """Returns the error in a line that is not `HOST slots=N`."""
    host, *others = line.split(maxsplit=1)
    if re.match(r"slots\s*=", host, re.IGNORECASE):
        return _Fault(f"the host before `{host}` is missing", f"write `HOST {host}`")
    if not others:
        return _fault_of_one_word(host)
    rest = others[0]
    if (fault := _name_fault(host)) is not None:
        return _with_line(fault, rest.rpartition("=")[2].strip())
    column = len(line) - len(rest)
    counted = re.match(r"slots=([0-9]+)\s", rest)
    if counted is not None:
        tail = rest[counted.end() :].lstrip()
        problem = "a comment needs a line of its own" if tail.startswith("#") else f"`{tail}` follows the number"
        return _Fault(problem, f"write `{host} slots={_plausible(counted[1])}`", len(line) - len(tail))
    # any word and a number, such as `gpus: 8` or `8`: whoever writes it means slots
    misspelt = re.fullmatch(r"([A-Za-z_-]*)\s*[=:]?\s*([0-9]{1,4})", rest)
    if misspelt is not None:
        slots = _plausible(misspelt[2])
        return _Fault(f"`{rest}` is not `slots={slots}`", f"write `{host} slots={slots}`", column)
    assigned = re.fullmatch(r"slots\s*=\s*(.*)", rest, re.IGNORECASE)
    if assigned is None:
        return _Fault(f"`{rest}` is not `slots=N`", f"write `{host} slots=8`", column)
    if not assigned[1]:
        return _Fault("the number of slots is missing", f"write `{host} slots=8`", column)
    fix = f"write `{host} slots={_plausible(assigned[1])}`"
    return _Fault(f"`{assigned[1]}` is not a whole number", fix, column)


def _fault_of_one_word(word: str) -> _Fault:
    """Returns the error in a line of one word."""
    counted = re.fullmatch(r"([^:,=]+)[:,=]([0-9]+)", word)
    host = counted[1] if counted else word
    if (fault := _name_fault(host)) is not None:
        return _with_line(fault, "")
    if counted is not None:
        fix = f"write `{counted[1]} slots={_plausible(counted[2])}`"
        return _Fault(f'"{word}" is not `HOST slots=N`', fix, len(counted[1]))
    return _Fault(f'"{word}" has no slots', f"write `{word} slots=8` if it has 8 GPUs", len(word))


def expand(text: str, slots: int | None, name: str = "--hosts") -> Hosts:
    """Returns the hosts of a list such as `gpu[01-16]`, `gpu[01-02,05]:8` or `10.0.0.1,10.0.0.2`.

    Leading zeros are kept, as in SLURM; `slots` is for hosts without `:N`; `name` is the source of the list, for
    messages. Raises InvalidConfig with every malformed or descending range and every repeated host.

    >>> [host.name for host in expand("gpu[08-10],login", 8).hosts]
    ['gpu08', 'gpu09', 'gpu10', 'login']
    """
    problems: list[str] = []
    hosts: dict[str, Host] = {}
    # a comma inside brackets separates numbers, not hosts
    for item in re.split(r",(?![^\[]*\])", text):
        try:
            expanded = _expand_item(item.strip(), slots)
        except InvalidConfig as error:
            problems.append(f"{name}: {error.problem}")
            continue
        if len(hosts) > MAX_HOSTS:
            break
        for host in expanded:
            if host.name in hosts:
                problems.append(f'{name}: "{host.name}" appears twice')
            hosts[host.name] = host
    if not problems and len(hosts) > MAX_HOSTS:
        problems.append(f"{name}: more than {MAX_HOSTS} hosts")
    if problems:
        raise InvalidConfig(
            "\n".join(dict.fromkeys(problems)), hint='Write hosts as "gpu[01-16]:8" or "10.0.0.1,10.0.0.2".'
        )
    return Hosts(hosts=tuple(hosts.values()), name=name)


def _expand_item(item: str, slots: int | None) -> list[Host]:
    """Returns the hosts of one item, which may contain several ranges. Raises InvalidConfig."""
    counted = re.fullmatch(r"(.*[^:]):([0-9]{1,6})", item)
    pattern, count = (counted[1], int(counted[2])) if counted else (item, slots)
    if not pattern:
        raise InvalidConfig("a name is missing between two commas" if not item else f'"{item}" has no name')
    parts = re.split(r"\[([^\[\]]*)\]", pattern)
    ranges = (_numbers(part) if order % 2 else [part] for order, part in enumerate(parts))  # odd parts are in brackets
    names = itertools.product(*ranges)
    hosts = [Host(name="".join(name), slots=count or 0) for name in itertools.islice(names, MAX_HOSTS + 1)]
    for host in hosts:
        if "[" in host.name or "]" in host.name:
            raise InvalidConfig(f'"{item}" has an unmatched bracket')
        if (fault := _name_fault(host.name)) is not None:
            fix = f'write "{fault.fix}:{count or 8}"' if fault.is_name else fault.fix
            raise InvalidConfig(f"{fault.problem}; {fix}")
    if count is None:
        raise InvalidConfig(f'"{item}" has no slots; write "{item}:8" if it has 8 GPUs')
    if not 0 < count <= MAX_SLOTS:
        raise InvalidConfig(f'"{item}": {count} is not a number of GPUs; write "{pattern}:8" if it has 8 GPUs')
    return hosts


def _numbers(ranges: str) -> list[str]:
    """Returns the numbers of `01-03,07` as text with leading zeros. Raises InvalidConfig."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        if match is None:
            raise InvalidConfig(f'"[{ranges}]" is not a range; write it as [01-16] or [1,4-7]')
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            width = len(first) if "0" in (first[0], last[0]) else 0
            ascending = f"[{last.zfill(width)}-{first.zfill(width)}]"
            raise InvalidConfig(f'the range "[{ranges}]" is descending; write {ascending}')
        if len(first) != len(last) and last.startswith("0"):
            raise InvalidConfig(
                f'the range "[{ranges}]" has inconsistent leading zeros; write [{first.zfill(len(last))}-{last}]'
            )
        if len(numbers) + int(last) - int(first) >= MAX_HOSTS:
            raise InvalidConfig(f'the range "[{ranges}]" is longer than {MAX_HOSTS} hosts')
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def placeholders(num_nodes: int, slots: int) -> Hosts:
    """Returns placeholders for hosts: `CHANGE-ME-1`, `CHANGE-ME-2` …"""
    names = [f"{PLACEHOLDER}-{number}" for number in range(1, num_nodes + 1)]
    hosts = tuple(Host(name=name, slots=slots, line=line) for line, name in enumerate(names, start=1))
    return Hosts(hosts=hosts, name="placeholders")


def render(hosts: Hosts) -> str:
    """Returns the text of a hostfile: one line `HOST slots=N` per host.

    >>> render(expand("gpu[1-2]", 8))
    'gpu1 slots=8\\ngpu2 slots=8\\n'
    """
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts.hosts)
