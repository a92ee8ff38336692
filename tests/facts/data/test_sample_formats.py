import pytest

from dstrain.choices import DataFormat
from dstrain.errors import InvalidConfig
from dstrain.facts.data.sample_formats import detect, require, to_messages, unused

MESSAGES, ALPACA, TEXT = DataFormat.MESSAGES, DataFormat.ALPACA, DataFormat.TEXT


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


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
        require(["text"], ALPACA)


def test_alpaca_joins_instruction_and_input_and_keeps_system_and_history() -> None:
    row = {"instruction": "Add.", "input": "1 + 1", "output": "2", "system": "Be brief.", "history": [["Hi", "Hello"]]}
    expected = [system("Be brief."), user("Hi"), assistant("Hello"), user("Add.\n1 + 1"), assistant("2")]
    assert to_messages(row, ALPACA) == expected


@pytest.mark.parametrize("absent", [None, ""])
def test_alpaca_without_input_is_the_instruction(absent: str | None) -> None:
    assert to_messages({"instruction": "Go.", "input": absent, "output": "x"}, ALPACA) == [user("Go."), assistant("x")]


def test_sharegpt_names_become_roles() -> None:
    row = {
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        "system": "s",
    }
    assert to_messages(row, MESSAGES) == [system("s"), user("a"), assistant("b")]


def test_system_turn_goes_before_system_column() -> None:
    row = {"messages": [system("turn"), user("a"), assistant("b")], "system": "column"}
    assert to_messages(row, MESSAGES) == [system("turn"), user("a"), assistant("b")]


def test_thoughts_of_an_answer_are_kept() -> None:
    turn = assistant("b") | {"reasoning_content": "hm"}
    assert to_messages({"messages": [user("a"), turn]}, MESSAGES) == [user("a"), turn]


def test_parts_of_text_are_joined() -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert to_messages({"messages": [turn, assistant("c")]}, MESSAGES) == [user("ab"), assistant("c")]


def test_text_is_returned_as_it_is() -> None:
    assert to_messages({"text": " a\n"}, TEXT) == " a\n"


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
        ({"messages": [assistant("") | {"tool_calls": [{}]}]}, MESSAGES, 'messages 1: "tool_calls" describes tools'),
        ({"messages": [assistant("a") | {"loss": False}]}, MESSAGES, 'messages 1: "loss" weights or masks'),
        ({"messages": [assistant("a") | {"weight": 0}]}, MESSAGES, 'messages 1: "weight" weights or masks'),
        ({"messages": [assistant("a") | {"thinking": "hm"}]}, MESSAGES, 'messages 1: "thinking" holds thoughts'),
        ({"messages": [user("a <image>"), assistant("b")]}, MESSAGES, 'turn 1, of the user: "<image>" holds images'),
        ({"instruction": "<|image_pad|>", "output": "b"}, ALPACA, '"<|image_pad|>" holds images'),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, MESSAGES, "parts that are not text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "text": "a", "image": "a.png"}]}]},
            MESSAGES,
            "parts that are not text",
        ),
        ({"text": None}, TEXT, '"text" is missing'),
    ],
)
def test_what_is_wrong_with_a_row_is_said(row: dict[str, object], data_format: DataFormat, problem: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        to_messages(row, data_format)
    assert problem in caught.value.problem


@pytest.mark.parametrize("name", ["image", "images", "video", "videos", "audio", "audios", "tools", "functions"])
def test_media_and_tools_are_refused_by_name(name: str) -> None:
    for row, data_format in (({"text": "a"}, TEXT), ({"messages": [user("a"), assistant("b")]}, MESSAGES)):
        with pytest.raises(InvalidConfig, match=f'^"{name}" .* is not supported'):
            to_messages(row | {name: ["a.png"]}, data_format)
        assert to_messages(row | {name: []}, data_format) == to_messages(row, data_format)


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("weight", 0.5, 1.0),
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


@pytest.mark.parametrize("text", ["What is `<video>`?", '<video src="a"></video>', "<video></video>", "a < image > b"])
def test_html_is_no_placeholder(text: str) -> None:
    assert to_messages({"messages": [user(text), assistant("b")]}, MESSAGES) == [user(text), assistant("b")]


def test_a_system_column_beside_a_system_turn_is_not_read() -> None:
    row = {"messages": [system("turn"), user("a"), assistant("b")], "system": "column"}
    assert unused(row, MESSAGES) == ["system"]


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        (["prompt", "completion"], 'Rename "prompt" to instruction and "completion" to output.'),
        (["query", "response"], 'Rename "query" to instruction and "response" to output.'),
        (["completion"], "Rename the columns to those of one of the formats."),
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
