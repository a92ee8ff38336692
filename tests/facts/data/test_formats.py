from typing import Any

import pytest

from dstrain.choices import DataFormat
from dstrain.errors import InvalidConfig
from dstrain.facts.data.formats import Pair, Reading, detect, require, to_pair, to_sample, unused
from dstrain.facts.data.turns import Conversation

MESSAGES, ALPACA, TEXT = DataFormat.MESSAGES, DataFormat.ALPACA, DataFormat.TEXT
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}


def to_messages(row: dict[str, Any], data_format: DataFormat, **options: Any) -> Any:
    """Returns the messages of a row, or its text."""
    sample = to_sample(row, Reading(format=data_format, **options))
    return sample.messages if isinstance(sample, Conversation) else sample


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


ONE = [user("a"), assistant("b")]
THOUGHT = assistant("b") | {"reasoning_content": "hm"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("columns", "data_format"),
    [
        (["instruction", "output"], ALPACA),
        (["instruction", "input", "output", "text"], ALPACA),
        (["messages"], MESSAGES),
        (["prompt", "prompt_id", "messages"], MESSAGES),
        (["conversations", "system"], MESSAGES),
        (["text", "meta"], TEXT),
    ],
)
def test_format_is_known_by_columns(columns: list[str], data_format: DataFormat) -> None:
    assert detect(columns) is data_format


def test_unknown_columns_are_named_with_what_each_format_needs() -> None:
    with pytest.raises(InvalidConfig) as caught:
        detect(["instructions", "output"])
    assert "instructions, output" in caught.value.problem
    for words in ("alpaca needs instruction and output", "messages needs messages", "text needs text"):
        assert words in caught.value.problem
    assert caught.value.hint == '"instructions": did you mean "instruction"?'


def test_named_format_needs_its_columns() -> None:
    with pytest.raises(InvalidConfig, match="alpaca needs instruction and output"):
        require(["text"], Reading(format=ALPACA))


@pytest.mark.parametrize(
    ("row", "data_format", "messages"),
    [
        (
            {"instruction": "Add.", "input": "1", "output": "2", "system": "Be brief.", "history": [["Hi", "Hello"]]},
            ALPACA,
            [system("Be brief."), user("Hi"), assistant("Hello"), user("Add.\n1"), assistant("2")],
        ),
        *(({"instruction": "a", "input": absent, "output": "b"}, ALPACA, ONE) for absent in (None, "")),
        ({"conversations": [said("human", "a"), said("gpt", "b")], "system": "s"}, MESSAGES, [system("s"), *ONE]),
        ({"messages": [system("turn"), *ONE], "system": "column"}, MESSAGES, [system("turn"), *ONE]),
        ({"messages": [user("a"), THOUGHT]}, MESSAGES, [user("a"), THOUGHT]),
        ({"messages": [user("ab") | {"content": PARTS}, assistant("c")]}, MESSAGES, [user("ab"), assistant("c")]),
        ({"text": " a\n"}, TEXT, " a\n"),
    ],
)
def test_rows_of_every_format_become_messages(row: dict[str, Any], data_format: DataFormat, messages: Any) -> None:
    assert to_messages(row, data_format) == messages


@pytest.mark.parametrize(
    ("row", "data_format", "problem"),
    [
        ({"instruction": "a"}, ALPACA, '"output" is missing'),
        ({"instruction": "a", "output": 2}, ALPACA, '"output" is 2; it must be a string'),
        ({"instruction": "", "output": "x"}, ALPACA, '"instruction" is empty'),
        ({"instruction": "a", "output": "x", "history": [["q"]]}, ALPACA, '"history" 1 is ["q"]'),
        ({"instruction": "a", "output": "x", "history": "q"}, ALPACA, '"history" is "q"'),
        ({"messages": []}, MESSAGES, '"messages" is empty'),
        ({"messages": "hello"}, MESSAGES, '"messages" is "hello"; it must be a list'),
        ({"other": 1}, MESSAGES, '"messages" is missing'),
        ({"messages": ["hello"]}, MESSAGES, 'messages 1 is "hello"'),
        ({"messages": [{"role": "user"}]}, MESSAGES, 'messages 1: "content" is missing'),
        ({"messages": [{"content": "a"}]}, MESSAGES, 'messages 1: "role" is missing'),
        ({"messages": [user("a")]}, MESSAGES, '"messages" ends with the user'),
        ({"messages": [{"role": "asistant", "content": "a"}]}, MESSAGES, 'messages 1: role is "asistant"'),
        ({"messages": [assistant("") | {"tool_calls": [{}]}]}, MESSAGES, "messages 1: tool_calls 1 is {}; a call must"),
        ({"messages": [user("") | {"tool_calls": [CALL]}]}, MESSAGES, "messages 1: the user calls a tool"),
        ({"messages": [said("function_call", "now()")]}, MESSAGES, 'messages 1 is "now()"; it must be JSON'),
        (
            {"messages": [assistant("a") | {"weight": 0.5}]},
            MESSAGES,
            "messages 1: weight is 0.5; a weight must be 0 or",
        ),
        ({"messages": [user("a") | {"train": True}]}, MESSAGES, "messages 1: train is true, but only answers carry"),
        ({"messages": [assistant("a") | {"train_detail": [{}]}]}, MESSAGES, '"train_detail" weights or masks'),
        ({"messages": [user("a"), assistant("b")], "tools": "no"}, MESSAGES, '"tools" is "no"; it must be JSON'),
        ({"messages": [user("a"), assistant("b")], "tools": [3]}, MESSAGES, '"tools" 1 is 3; a tool must be'),
        ({"text": "a", "weight": 0}, TEXT, '"weight" is 0'),
        ({"messages": [assistant("a") | {"thinking": "hm"}]}, MESSAGES, 'messages 1: "thinking" holds thoughts'),
        (
            {"messages": [user("a <image>"), assistant("b")]},
            MESSAGES,
            'turn 1, of the user: "<image>" stands for an image',
        ),
        ({"instruction": "<|image_pad|>", "output": "b"}, ALPACA, '"<|image_pad|>" stands for an image'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "text": "a", "image": "a.png"}]}]},
            MESSAGES,
            "content has an image with text",
        ),
        ({"text": None}, TEXT, '"text" is missing'),
    ],
)
def test_what_is_wrong_with_a_row_is_said(row: dict[str, object], data_format: DataFormat, problem: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        to_messages(row, data_format)
    assert problem in caught.value.problem


@pytest.mark.parametrize("name", ["image", "images", "video", "videos", "audio", "audios"])
def test_media_beside_a_text_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f'^"{name}" .* is not supported'):
        to_messages({"text": "a", name: ["a.png"]}, TEXT)
    assert to_messages({"text": "a", name: []}, TEXT) == to_messages({"text": "a"}, TEXT)


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("loss_mask", [1, 0], [1, 1]),
        ("loss_scale", 0, float("nan")),
        ("chosen", "b", ""),
        ("rejected", [assistant("b")], []),
        ("rejected_response", "b", None),
        ("label", False, "positive"),
        ("kto_tag", False, True),
    ],
)
def test_weights_and_preferences_are_refused_where_they_say_something(
    name: str, value: object, neutral: object
) -> None:
    row = {"instruction": "a", "output": "b"}
    with pytest.raises(InvalidConfig, match=f'^"{name}" '):
        to_messages(row | {name: value}, ALPACA)
    assert len(to_messages(row | {name: neutral}, ALPACA)) == 2


TURNS = [user("a"), assistant("b"), user("c"), assistant("d")]


@pytest.mark.parametrize("mask", [[0, 0, 1, 1], [1, False, 0, True]])
def test_a_mask_has_an_entry_for_each_turn(mask: list[int]) -> None:
    by_row = to_sample({"messages": TURNS, "loss_mask": mask}, Reading(format=MESSAGES))
    turns = [{**turn, "loss_mask": entry} for turn, entry in zip(TURNS, mask, strict=True)]
    assert by_row == to_sample({"messages": turns}, Reading(format=MESSAGES))
    assert isinstance(by_row, Conversation)
    assert {1, 3} & by_row.unlearned == {1}
    assert unused({"messages": turns, "loss_mask": mask}, Reading(format=MESSAGES)) == []


@pytest.mark.parametrize(("mask", "says"), [([1, 0], "for each of the 4 turns"), ([0, 0, 1, 0.5], "must be 0 or 1")])
def test_a_mask_of_something_else_is_refused(mask: list[float], says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        to_sample({"messages": TURNS, "loss_mask": mask}, Reading(format=MESSAGES))


@pytest.mark.parametrize("text", ["What is `<video>`?", '<video src="a"></video>', "<video></video>", "a < image > b"])
def test_html_is_no_placeholder(text: str) -> None:
    assert to_messages({"messages": [user(text), assistant("b")]}, MESSAGES) == [user(text), assistant("b")]


def test_a_system_column_beside_a_system_turn_is_not_read() -> None:
    row = {"messages": [system("turn"), user("a"), assistant("b")], "system": "column"}
    assert unused(row, Reading(format=MESSAGES)) == ["system"]


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        (["completion"], "Name the columns in the job: columns: {question: YOUR_COLUMN, answer: YOUR_COLUMN}."),
        (["mesages"], '"mesages": did you mean "messages"?'),
    ],
)
def test_columns_of_no_format_get_a_name_only_where_it_is_certain(columns: list[str], hint: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        detect(columns)
    assert caught.value.hint == hint


def test_unknown_role_gets_the_nearest() -> None:
    with pytest.raises(InvalidConfig) as caught:
        to_messages({"messages": [{"role": "asistant", "content": "a"}]}, MESSAGES)
    assert caught.value.hint == 'Did you mean "assistant"?'


@pytest.mark.parametrize(
    ("question", "answer"),
    [("prompt", "completion"), ("prompt", "response"), ("query", "response"), ("question", "answer")],
)
def test_a_question_and_its_answer_have_other_names(question: str, answer: str) -> None:
    row = {question: "a", answer: "b", "system": "s", "history": [["x", "y"]], "input": "i"}
    assert detect(row) is ALPACA
    assert to_messages(row, ALPACA) == [system("s"), user("x"), assistant("y"), user("a"), assistant("b")]
    assert unused(row, Reading(format=ALPACA)) == ["input"]


def test_of_a_prompt_and_a_completion_in_turns_only_the_completion_carries_loss() -> None:
    row = {"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")]}
    sample = to_sample(row, Reading(format=ALPACA, system="s"))
    assert isinstance(sample, Conversation)
    assert sample.messages == [system("s"), user("a"), assistant("b"), user("c"), assistant("d")]
    assert sample.unlearned == {2}


def test_columns_are_named_by_the_job() -> None:
    reading = require(["q", "a", "output", "id"], Reading(columns={"question": "q", "answer": "a", "system": "sys"}))
    assert reading.format is ALPACA
    row = {"q": "x", "a": "y", "output": "z", "id": 3}
    assert to_messages(row, ALPACA, columns=reading.columns) == [user("x"), assistant("y")]
    assert unused(row, reading) == ["output", "id"]
    with pytest.raises(InvalidConfig, match='columns: question is "p", but the columns are q, a'):
        require(["q", "a"], Reading(columns={"question": "p"}))


def test_a_system_prompt_of_the_job_is_for_conversations_without_one() -> None:
    row = {"messages": [user("a"), assistant("b")]}
    assert to_messages(row, MESSAGES, system="s") == [system("s"), user("a"), assistant("b")]
    assert to_messages(row | {"system": "t"}, MESSAGES, system="s")[0] == system("t")
    own = {"messages": [system("u"), user("a"), assistant("b")]}
    assert to_messages(own, MESSAGES, system="s")[0] == system("u")


def test_calls_of_openai_sharegpt_and_swift_are_the_same() -> None:
    openai = [user("a"), {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]
    old = [user("a"), {"role": "assistant", "content": None, "function_call": CALL["function"]},
           {"role": "function", "content": "3"}]  # fmt: skip
    sharegpt = [said("human", "a"), said("function_call", '{"name": "now", "arguments": {"zone": "UTC"}}'),
                said("observation", "3")]  # fmt: skip
    swift = [user("a"), {"role": "tool_call", "content": '{"name": "now", "arguments": {"zone": "UTC"}}'},
             {"role": "tool_response", "content": "3"}]  # fmt: skip
    for turns in (openai, old, sharegpt, swift):
        messages = to_messages({"messages": [*turns, assistant("b")]}, MESSAGES)
        (call,) = messages[1]["tool_calls"]
        assert call["function"] == {"name": "now", "arguments": {"zone": "UTC"}}
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]


def test_calls_one_after_the_other_are_of_one_answer_and_keep_their_thoughts() -> None:
    turns = [said("human", "a"), said("function_call", '<think>hm</think>{"name": "f", "arguments": {}}'),
             said("function_call", '[{"name": "g", "arguments": "{}"}]'), said("observation", "3"),
             said("gpt", "b")]  # fmt: skip
    message = to_messages({"conversations": turns}, MESSAGES)[1]
    assert message["content"] == "<think>hm</think>"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]


@pytest.mark.parametrize("tools", [[NOW], [{"type": "function", "function": NOW}], f"[{NOW!r}]".replace("'", '"')])
def test_tools_are_lists_or_json_and_get_openais_form(tools: Any) -> None:
    sample = to_sample({"messages": [user("a"), assistant("b")], "tools": tools}, Reading(format=MESSAGES))
    assert isinstance(sample, Conversation)
    assert sample.tools == [{"type": "function", "function": NOW}]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"loss": False}, {"train": 0.0}, {"training": False}, {"mask": True}])
def test_an_answer_of_weight_0_carries_no_loss(mark: dict[str, Any]) -> None:
    row = {"messages": [user("a"), assistant("b") | mark, user("c") | {"weight": 1}, assistant("d") | {"weight": 1}]}
    sample = to_sample(row, Reading(format=MESSAGES, system="s"))
    assert isinstance(sample, Conversation)
    assert sample.unlearned == {2}
    assert unused(row, Reading(format=MESSAGES)) == []
    whole = to_sample(row | {"weight": 0}, Reading(format=MESSAGES))
    assert isinstance(whole, Conversation)
    assert whole.unlearned == {1, 3}


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
