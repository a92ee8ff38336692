"""Every usual way to write a pair is the same pair, and what is no pair is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from dstrain.choices import DataFormat
from dstrain.errors import InvalidConfig
from dstrain.facts.data.preferences import Pair, to_pair
from dstrain.facts.data.sample_formats import Reading, unused
from dstrain.facts.data.turns import Conversation

QUESTION = {"role": "user", "content": "1 + 1?"}
GOOD, BAD = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}
SAID = {"from": "human", "value": "1 + 1?"}
PAIR = Pair(chosen=Conversation(messages=[QUESTION, GOOD]), rejected=Conversation(messages=[QUESTION, BAD]))
PREFERENCE = Reading(format=DataFormat.PREFERENCE)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
        {"question": "1 + 1?", "chosen": "2", "rejected": "3"},
        {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"prompt": "1 + 1?", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"conversations": [SAID], "chosen": {"from": "gpt", "value": "2"}, "rejected": {"from": "gpt", "value": "3"}},
        {"instruction": "1 + 1?", "input": "", "chosen": "2", "rejected": "3"},
    ],
)
def test_the_formats_of_other_tools_are_read(row: dict[str, Any]) -> None:
    assert to_pair(row, PREFERENCE) == PAIR


def test_a_system_prompt_and_earlier_turns_are_part_of_both_sides() -> None:
    earlier = [QUESTION, GOOD, {"role": "user", "content": "And 2 + 2?"}]
    pair = to_pair({"system": "Be brief.", "prompt": earlier, "chosen": "4", "rejected": ""}, PREFERENCE)
    assert [message["role"] for message in pair.chosen.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert pair.chosen.messages[:-1] == pair.rejected.messages[:-1]
    assert (pair.num_empty, pair.is_equal) == (1, False)


def seen(image: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image>What?", "chosen": "b", "rejected": "c", "images": ["x.png"]},
        {"instruction": "What?", "chosen": "b", "rejected": "c", "image": "x.png"},
        {"conversations": [QUESTION], "chosen": GOOD, "rejected": BAD, "images": ["x.png"]},
        {"prompt": [seen("x.png")], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [seen("x.png"), GOOD], "rejected": [seen("x.png"), BAD]},
    ],
)
def test_both_sides_have_the_images_of_the_prompt(row: dict[str, Any]) -> None:
    pair = to_pair(row, PREFERENCE)
    assert (pair.chosen.images, pair.rejected.images) == (("x.png",), ("x.png",))
    assert pair.chosen.messages[0]["content"].startswith("<image>")
    assert unused(row, PREFERENCE) == []


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, '"rejected" is missing'),
        ({"chosen": "b", "rejected": "c"}, "chosen: has no question"),
        ({"chosen": [QUESTION, GOOD], "rejected": [SAID | {"value": "?"}, BAD]}, "differ before their last answer"),
        ({"prompt": "Other", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}, "chosen: is a conversation"),
        ({"prompt": "a", "chosen": [QUESTION], "rejected": "c"}, "chosen: .*ends with the user"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "rejected: is 3, not a text"),
        ({"instruction": "a", "chosen": ["b", "c"], "rejected": "c"}, "chosen: is not the text of one answer"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "images": [3]}, 'chosen: "images" is 3; it must be a path'),
        ({"chosen": [seen("x.png"), GOOD], "rejected": [seen("y.png"), BAD]}, "differ before their last answer"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "rejected_images": ["x.png"]}, '"rejected_images" marks'),
    ],
)
def test_what_is_no_pair_is_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        to_pair(row, PREFERENCE)


def test_columns_that_are_not_read_are_named() -> None:
    row = {"prompt": "a", "question": "b", "chosen": "c", "rejected": "d", "margin": 0.5, "note": None}
    assert unused(row, PREFERENCE) == ["question", "margin"]


def test_columns_of_other_names_and_a_system_prompt_for_all_are_the_jobs() -> None:
    row = {"ask": "1 + 1?", "good": "2", "bad": "3"}
    columns = {"prompt": "ask", "chosen": "good", "rejected": "bad"}
    pair = to_pair(row, Reading(format=DataFormat.PREFERENCE, columns=columns, system="Be brief."))
    assert [message["content"] for message in pair.rejected.messages] == ["Be brief.", "1 + 1?", "3"]
