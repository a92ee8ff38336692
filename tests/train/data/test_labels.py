"""What carries loss under the chat templates of real families, compared with files that were read line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dstrain.choices import LossOn, Thinking
from dstrain.errors import InvalidConfig
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


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes with the family's template, and a token for every tag in it."""
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    begin, end = ENDS.get(name, ("<s>", "<|im_end|>"))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end, chat_template=template)
    made.add_tokens(sorted({*TAG.findall(template), "<think>", "</think>"}), special_tokens=True)
    return made


def learned(tokenizer: Any, talk: list[dict[str, str]], thinking: Thinking = Thinking.AUTO) -> list[str]:
    """Returns the stretches of text that carry loss, or why the conversation is refused."""
    encoder = Encoder(tokenizer=tokenizer, seq_len=4096, loss_on=LossOn.ANSWER, thinking=thinking)
    try:
        (encoded,) = encoder.encode([("here", talk)])
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
    (encoded,) = encoder.encode([("here", talk)])
    prompt = str(tokenizer.apply_chat_template(talk[:-1], tokenize=False))
    assert "Be brief." in prompt
    assert tokenizer.decode(encoded.input_ids) == prompt + "Nine.</s>"
