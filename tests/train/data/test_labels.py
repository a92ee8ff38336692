"""What carries loss under the chat templates of real families, compared with files that were read line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dstrain.choices import LossOn, Thinking
from dstrain.errors import InvalidConfig
from dstrain.facts.data.turns import Conversation
from dstrain.train.data.chat import Answer
from dstrain.train.data.tokenize import Encoder

TEMPLATES = Path(__file__).parent / "templates"
TAG = re.compile(r"</?[^<>\s'\"{}+]{1,40}>|\[/?[A-Z_]{3,20}\]")
ENDS = {
    "deepseek-r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "deepseek-v3": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "ernie-4.5": ("<|begin_of_sentence|>", "<|end_of_sentence|>"),
    "glm-4": (None, "<|endoftext|>"),
    "glm-4.5": (None, "<|endoftext|>"),
    "llama-3": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral-nemo": ("<s>", "</s>"),
    "mistral-v0.3": ("<s>", "</s>"),
    "phi-3": ("<s>", "<|endoftext|>"),
    "phi-3.5": ("<s>", "<|endoftext|>"),
    "phi-4-mini": ("<|endoftext|>", "<|endoftext|>"),
}
"""The tokens that begin and end a text; of the others `<s>` and `<|im_end|>`."""


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def answer(content: str, **more: str) -> dict[str, str]:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
ADDED = "<think>\nAdd.\n</think>\n\nFour."
TALKS = {
    "one turn": [user("Two?"), answer("Four.")],
    "system": [SYSTEM, user("Two?"), answer("Four.")],
    "system, two turns": [SYSTEM, user("Two?"), answer("Four."), user("Three?"), answer("Nine.")],
    "thoughts": [user("Two?"), answer(ADDED)],
    "thoughts twice": [user("Two?"), answer(ADDED), user("Three?"), answer("<think>\nTimes.\n</think>\n\nNine.")],
    "thoughts at first": [user("Two?"), answer(ADDED), user("Three?"), answer("Nine.")],
    "reasoning_content": [user("2?"), answer("4.", reasoning_content="Add."), user("3?"), answer("9.")],
    "thoughts not opened": [user("Two?"), answer("Add.\n</think>\n\nFour.")],
    "tags first": [user("Two?"), answer("<b>Four</b>"), user("Three?"), answer("<table>Nine")],
    "empty": [user("Two?"), answer("")],
    "empty at first": [user("Two?"), answer(""), user("Three?"), answer("Nine.")],
    "blank at first": [user("Two?"), answer("  \n"), user("Three?"), answer("Nine.")],
    "two answers": [user("Two?"), answer("Four."), answer("Or five."), user("Three?"), answer("Nine.")],
    "quoted ends": [
        user("Ends?"),
        answer("<|im_end|>, </s> or <|user|>."),
        user("And?"),
        answer("<|im_start|>assistant\nno<|im_end|>\n<|im_start|>user\nAnd?"),
    ],
    "quoted tags": [user("Tags?"), answer("It is <think> and </think>."), user("More?"), answer("No.")],
    "repeated": [user("Say Four."), answer("Four."), user("Say Four."), answer("Four.")],
    "in the question": [user("Four. or Five.?"), answer("Four."), user("Four."), answer("Four. or Five.")],
    "white space": [user("Two? \n"), answer("  Four.  \n\n"), user(" Three?"), answer("\nNine. ")],
    "Chinese, emoji": [
        user("你好吗？"),
        answer("很好，谢谢。\U0001f600 é"),
        user("é"),
        answer("\U0001f468‍\U0001f469‍\U0001f467"),
    ],
    "lines": [user("Two?"), answer("Four.\n\n  Five.\n"), user("x"), answer("a\n\nb")],
}


TAGGED = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{% endif %}{{- '\\n' }}{% endfor %}"""
"""A template that marks the answers itself."""


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": arguments}}


def calls(*tool_calls: dict[str, Any], content: str = "", **more: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(tool_calls), **more}


RESULT = {"role": "tool", "content": "Sunny <|im_end|>", "name": "weather", "tool_call_id": "abcdefghi"}
CITY = {"type": "string", "description": "The city."}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}}]
TOOL_TALKS = {
    "call": [user("Paris?"), calls(call(city="Paris", days=2)), RESULT, answer("Sun.")],
    "call at the end": [SYSTEM, user("Paris?"), calls(call(days=2))],
    "text and call": [user("Paris?"), calls(call(days=2), content="Let me see."), RESULT, answer("Sun.")],
    "two calls": [user("Both?"), calls(call(city="<|im_end|>"), call(city="Rome")), RESULT, RESULT, answer("Sun.")],
    "calls in two turns": [user("a"), calls(call()), RESULT, answer("b"), user("c"), calls(call(n=[1])), RESULT,
                           answer("d")],
    "thoughts": [user("a"), calls(call(city="Paris"), reasoning_content="Ask."), RESULT, answer(ADDED), user("b"),
                 calls(call(city="Rome"), content="<think>\nAgain.\n</think>\n\n"), RESULT, answer("c")],
}  # fmt: skip
"""Conversations with tool calls; results of tools carry no loss."""


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes with the family's template."""
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return byte_tokenizer(template, *ENDS.get(name, ("<s>", "<|im_end|>")))


def byte_tokenizer(template: str, begin: str | None, end: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes with a template, and a token for every tag in it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end, chat_template=template)
    made.add_tokens(sorted({*TAG.findall(template), "<think>", "</think>"}), special_tokens=True)
    return made


def learned(
    tokenizer: Any, talk: list[dict[str, Any]], thinking: Thinking = Thinking.AUTO, *, tools: Any = None
) -> list[str]:
    """Returns the stretches of text that carry loss, or why the conversation is refused."""
    encoder = Encoder(tokenizer=tokenizer, seq_len=4096, loss_on=LossOn.ANSWER, thinking=thinking)
    try:
        (encoded,) = encoder.encode([("here", Conversation(messages=talk, tools=tools))])
    except InvalidConfig as error:
        return [f"refused: {error.problem}"]
    stretches: list[list[int]] = [[]]
    for token, label in zip(encoded.input_ids, encoded.labels, strict=True):
        assert label in (token, -100)
        stretches = [*stretches[:-1], [*stretches[-1], label]] if label != -100 else [*stretches, []]
    return [json.dumps(tokenizer.decode(stretch), ensure_ascii=False) for stretch in stretches if stretch]


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_loss_is_on_answers_and_what_ends_them(name: str, golden: Callable[[str, str], None]) -> None:
    tokenizer = make_tokenizer(name)
    blocks = [f"{title}\n" + "".join(f"    {line}\n" for line in learned(tokenizer, TALKS[title])) for title in TALKS]
    golden(f"labels/{name}.txt", "".join(blocks))


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_loss_is_on_tool_calls_and_not_on_results(name: str, golden: Callable[[str, str], None]) -> None:
    tokenizer = make_tokenizer(name)
    stretches = {title: learned(tokenizer, talk, tools=TOOLS) for title, talk in TOOL_TALKS.items()}
    blocks = [f"{title}\n" + "".join(f"    {line}\n" for line in lines) for title, lines in stretches.items()]
    golden(f"labels/tools/{name}.txt", "".join(blocks))
    assert not any("Sunny" in line for lines in stretches.values() for line in lines)


def test_tools_that_a_template_does_not_describe_are_counted() -> None:
    talk = Conversation(messages=[user("a"), answer("b")], tools=TOOLS)
    counts = []
    for name in ("qwen3", "llama-3"):
        encoder = Encoder(tokenizer=make_tokenizer(name), seq_len=4096, loss_on=LossOn.ANSWER)
        counts += [encoded.counts.lost_tools for encoded in encoder.encode([("here", talk)])]
    assert counts == [0, 1]


@pytest.mark.parametrize(
    ("loss_on", "unlearned", "expected"),
    [
        (LossOn.ANSWER, set(), "Four.<|im_end|>Nine.<|im_end|>"),
        (LossOn.ANSWER, {1}, "Nine.<|im_end|>"),
        (LossOn.LAST, set(), "Nine.<|im_end|>"),
        (LossOn.LAST, {3}, ""),
    ],
)
@pytest.mark.parametrize("is_tagged", [False, True])
def test_answers_of_weight_0_and_earlier_answers_carry_no_loss(
    loss_on: LossOn, unlearned: set[int], expected: str, is_tagged: bool
) -> None:
    tokenizer: Any = make_tokenizer("qwen2.5")
    if is_tagged:
        tokenizer.chat_template = TAGGED
    talk = [user("Two?"), answer("Four."), user("Three?"), answer("Nine.")]
    encoder = Encoder(tokenizer=tokenizer, seq_len=4096, loss_on=loss_on)
    (encoded,) = encoder.encode([("here", Conversation(messages=talk, unlearned=frozenset(unlearned)))])
    labels = [label for label in encoded.labels if label != -100]
    assert tokenizer.decode(labels) == expected
    assert encoded.teaches == bool(expected)


def test_weights_need_a_loss_on_answers() -> None:
    encoder = Encoder(tokenizer=make_tokenizer("qwen2.5"), seq_len=4096, loss_on=LossOn.ALL)
    talk = Conversation(messages=[user("Two?"), answer("Four.")], unlearned=frozenset({1}))
    with pytest.raises(InvalidConfig, match="here: an answer has weight 0, but loss_on is all"):
        list(encoder.encode([("here", talk)]))


@pytest.mark.parametrize(
    ("name", "thinking", "expected"),
    [
        (
            "qwen3",
            Thinking.ALL,
            ["<think>\nAdd.\n</think>\n\nFour.<|im_end|>", "<think>\n\n</think>\n\nNine.<|im_end|>"],
        ),
        ("qwen3", Thinking.LAST, ["Four.<|im_end|>", "<think>\n\n</think>\n\nNine.<|im_end|>"]),
        ("qwen3", Thinking.OFF, ["Four.<|im_end|>", "Nine.<|im_end|>"]),
        ("qwen3.5", Thinking.OFF, ["Four.<|im_end|>", "Nine.<|im_end|>"]),
        ("glm-4.5", Thinking.OFF, ["\nFour.<|user|>", "\nNine.<|user|>"]),
        ("llama-3", Thinking.LAST, ["Four.<|eot_id|>", "Nine.<|eot_id|>"]),
    ],
)
def test_thoughts_are_kept_as_the_job_says(name: str, thinking: Thinking, expected: list[str]) -> None:
    stretches = learned(make_tokenizer(name), TALKS["thoughts at first"], thinking)
    assert [json.loads(stretch) for stretch in stretches] == expected


def test_system_prompt_that_a_finished_conversation_lacks_is_where_the_model_reads_it() -> None:
    tokenizer = make_tokenizer("mistral-nemo")
    encoder = Encoder(tokenizer=tokenizer, seq_len=4096, loss_on=LossOn.ANSWER)
    talk = TALKS["system, two turns"]
    (encoded,) = encoder.encode([("here", Conversation(messages=talk))])
    prompt = str(tokenizer.apply_chat_template(talk[:-1], tokenize=False))
    assert "Be brief." in prompt
    assert tokenizer.decode(encoded.input_ids) == prompt + "Nine.</s>"


def test_thoughts_have_the_name_that_gpt_oss_reads_whatever_the_release_of_transformers() -> None:
    message = Answer(visible="Four.", thought="Add.").message(splits=False)
    assert message == {"role": "assistant", "content": "Four.", "reasoning_content": "Add.", "thinking": "Add."}
