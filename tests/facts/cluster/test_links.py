"""Links: the table, and names as people type them."""

from __future__ import annotations

import pytest

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import LINKS, link


@pytest.mark.parametrize("name", LINKS)
def test_every_link_has_a_rate_and_a_source(name: str) -> None:
    row = LINKS[name]
    assert row.name == name
    assert 1e9 < row.bytes_per_s < 1e12
    assert len(row.source) > 10


@pytest.mark.parametrize(
    ("name", "gbit_per_s"),
    [("ib100", 100), ("ib200", 200), ("ib400", 400), ("ib800", 800), ("roce25", 25), ("eth10", 10)],
)
def test_an_adapter_carries_the_bits_in_its_name(name: str, gbit_per_s: int) -> None:
    assert link(name).bytes_per_s == gbit_per_s * 1e9 / 8


def test_generations_and_lanes_are_as_fast_as_they_should_be() -> None:
    rates = [link(f"nvlink{generation}").bytes_per_s for generation in (2, 3, 4, 5)]
    assert rates == sorted(rates)
    for generation in (4, 5):
        assert 2 * link(f"pcie{generation}x8").bytes_per_s == link(f"pcie{generation}").bytes_per_s
    assert link(" IB400 ") is LINKS["ib400"], "case and blanks are forgiven"


def test_a_shared_adapter_gives_each_gpu_its_part() -> None:
    shared = link("ib400/4")
    assert (shared.name, shared.bytes_per_s) == ("ib400/4", 12.5e9)
    assert "shared by 4" in shared.source


WHOLE = 'Write "ib400/8" if 8 GPUs share one.'


@pytest.mark.parametrize(
    ("name", "problem", "hint"),
    [
        *(
            (f"ib400/{share}", "after the slash", 'Write "ib400/8" if 8 GPUs share one.')
            for share in ("0", "", "x", "-1")
        ),
        ("nvlnk4", '"nvlnk4" is not a link', 'Did you mean "nvlink4"?'),
        ("zzz", '"zzz" is not a link', "Known: " + ", ".join(LINKS)),
    ],
)
def test_what_is_no_link_is_refused_with_what_to_write(name: str, problem: str, hint: str) -> None:
    with pytest.raises(InvalidConfig, match=problem) as caught:
        link(name)
    assert caught.value.hint == hint


def test_the_table_is_read_only() -> None:
    with pytest.raises(TypeError):
        LINKS["mine"] = LINKS["ib400"]  # type: ignore[index]
