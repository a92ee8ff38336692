"""Links: the table, and names as people type them."""

from __future__ import annotations

import pytest

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.links import LINKS, link


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


def test_each_nvlink_generation_is_faster_than_the_one_before() -> None:
    rates = [link(f"nvlink{generation}").bytes_per_s for generation in (2, 3, 4, 5)]

    assert rates == sorted(rates)


def test_half_the_lanes_of_a_pcie_generation_carry_half() -> None:
    for generation in (4, 5):
        assert 2 * link(f"pcie{generation}x8").bytes_per_s == link(f"pcie{generation}").bytes_per_s


def test_case_and_blanks_are_forgiven() -> None:
    assert link(" IB400 ") is LINKS["ib400"]


def test_a_shared_adapter_gives_each_gpu_its_part() -> None:
    shared = link("ib400/4")

    assert (shared.name, shared.bytes_per_s) == ("ib400/4", 12.5e9)
    assert "shared by 4" in shared.source


@pytest.mark.parametrize("name", ["ib400/0", "ib400/", "ib400/x", "ib400/-1"])
def test_a_share_that_is_no_count_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match="after the slash") as caught:
        link(name)

    assert caught.value.hint == 'Write "ib400/8" if 8 GPUs share one.'


def test_a_misspelt_link_gets_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match='"nvlnk4" is not a link') as caught:
        link("nvlnk4")

    assert caught.value.hint == 'Did you mean "nvlink4"?'


def test_a_strange_link_gets_all_of_them() -> None:
    with pytest.raises(InvalidConfig) as caught:
        link("zzz")

    assert caught.value.hint == "Known: " + ", ".join(LINKS)


def test_the_table_is_read_only() -> None:
    with pytest.raises(TypeError):
        LINKS["mine"] = LINKS["ib400"]  # type: ignore[index]
