"""Compares what carries loss with TRL's training templates, family by family: the table of docs/labels.md.

    pip install --target trl-only --no-deps trl==1.16
    python benchmarks/labels.py trl-only/trl/chat_templates

Both sides get the same conversations and a tokenizer of bytes. Ours follows the family's own template; TRL's training
template marks the answers itself, which Transformers reads. `-v` prints every difference.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstrain.choices import LossOn
from dstrain.errors import InvalidConfig
from dstrain.facts.data.turns import Conversation
from dstrain.train.data.tokenize import IGNORED, Encoder
from tests.train.data.test_labels import TALKS, TOOL_TALKS, TOOLS, byte_tokenizer

FAMILIES = {
    "qwen2_5": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_instruct_2507": "Qwen3-2507",
    "qwen3_5_think": "Qwen3.5",
    "llama3": "Llama 3",
    "gemma3": "Gemma 3",
    "phi3_5": "Phi-3.5",
    "glm4moe": "GLM-4.5",
    "gptoss": "gpt-oss",
    "deepseekv3": "DeepSeek-V3",
    "deepseek_r1_distill": "DeepSeek-R1 distilled",
    "cohere2": "Command R7B",
    "lfm2": "LFM2",
}
"""TRL's name of a template → the family."""
ENDS = {
    "llama3": "<|eot_id|>",
    "phi3_5": "<|endoftext|>",
    "glm4moe": "<|endoftext|>",
    "gptoss": "<|return|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
}
"""The end of a text; of the others `<|im_end|>`."""
CONVERSATIONS = (
    *("one turn", "system", "system, two turns", "thoughts", "thoughts twice", "thoughts at first"),
    *("empty", "empty at first", "quoted ends", "white space", "Chinese, emoji"),
)
CALLS = ("call", "text and call", "calls in two turns", "thoughts")


def stretches(tokenizer: Any, conversation: Conversation) -> list[str]:
    """Returns the stretches of text that carry loss, or why the conversation is refused."""
    encoder = Encoder(tokenizer=tokenizer, seq_len=2**16, loss_on=LossOn.ANSWER)
    try:
        (encoded,) = encoder.encode([("", conversation)])
    except InvalidConfig as error:
        return [f"refused{error.problem}"]
    found: list[list[int]] = [[]]
    for label in encoded.labels:
        if label == IGNORED:
            found.append([])
        else:
            found[-1].append(label)
    return [tokenizer.decode(stretch) for stretch in found if stretch]


def kind(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Returns how two lists of stretches differ."""
    refusals = [name for name, side in (("ours", ours), ("TRL's", theirs)) if side and side[0].startswith("refused")]
    if refusals:
        return "refused by both" if len(refusals) == 2 else f"refused ({refusals[0]})"
    pairs = list(zip(ours, theirs, strict=False))
    if len(ours) != len(theirs):
        return f"{len(ours)} answers, TRL {len(theirs)}"
    if all(here == there for here, there in pairs):
        return "same"
    if all(here.strip() == there.strip() for here, there in pairs):
        return "white space at an end"
    if all(there.strip().endswith(here.strip()) for here, there in pairs):
        return "TRL learns a part of the prompt"
    return "text"


def main() -> None:
    """Prints the table, and with -v the differences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("templates", type=Path, help="TRL's folder chat_templates")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every difference")
    options = parser.parse_args()
    talks = {title: Conversation(messages=TALKS[title]) for title in CONVERSATIONS}
    talks |= {f"tools: {title}": Conversation(messages=TOOL_TALKS[title], tools=TOOLS) for title in CALLS}
    for name, family in FAMILIES.items():
        template, training = (
            (options.templates / f"{name}{part}.jinja").read_text(encoding="utf-8") for part in ("", "_training")
        )
        ends = ("<s>", ENDS.get(name, "<|im_end|>"))
        tokenizers = [byte_tokenizer(text, *ends) for text in (template, training)]
        kinds: dict[str, list[str]] = {}
        for title, talk in talks.items():
            ours, theirs = (stretches(tokenizer, talk) for tokenizer in tokenizers)
            kinds.setdefault(kind(ours, theirs), []).append(title)
            if options.verbose and ours != theirs:
                print(f"  {family}, {title}\n    ours {json.dumps(ours, ensure_ascii=False)}")
                print(f"    TRL  {json.dumps(theirs, ensure_ascii=False)}")
        cells = "; ".join(f"{what} {len(titles)}" for what, titles in kinds.items() if what != "same")
        print(f"| {family} | {len(kinds.get('same', []))} of {len(talks)} | {cells or '–'} |", flush=True)


if __name__ == "__main__":
    main()
