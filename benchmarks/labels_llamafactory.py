"""Encodes conversations as `llamafactory-cli train` does, in an environment of its own, for `benchmarks/labels.py`.

Reads a list of cases in JSON: the folder of a tokenizer, the name in `template:`, a format of the data (`sharegpt` or
`openai`), conversations. Writes the tokens and labels of each conversation, or the error that ends it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llamafactory.data.converter import get_dataset_converter
from llamafactory.data.parser import DatasetAttr
from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
from llamafactory.data.template import Template, get_template_and_fix_tokenizer
from llamafactory.hparams import DataArguments
from transformers import AutoTokenizer

CUTOFF = 2**16
_SIZES = SimpleNamespace(merge_size=2, temporal_patch_size=2)
NO_IMAGES = SimpleNamespace(image_processor=_SIZES, video_processor=_SIZES, boi_token="", full_image_sequence="")
"""In place of the processor of images, which templates of multimodal models require; no conversation has images."""


def sharegpt(message: Mapping[str, Any], template: Template) -> dict[str, str]:
    """Returns a message as LLaMA-Factory's documentation writes it: the calls are JSON in a turn of their own role."""
    role, content = message["role"], message.get("content") or ""
    if message.get("reasoning_content"):
        content = f"<think>\n{message['reasoning_content']}\n</think>\n\n{content}"
    if not message.get("tool_calls"):
        return {"role": {"tool": "observation"}.get(role, role), "content": content}
    calls = json.dumps([call["function"] for call in message["tool_calls"]], ensure_ascii=False)
    if not content:
        return {"role": "function_call", "content": calls}
    line_break = "" if content.endswith("\n") else "\n"
    return {"role": "function_call", "content": content + line_break + calls.join(template.tool_call_words)}


def encoded(processor: SupervisedDatasetProcessor, talk: Mapping[str, Any], formatting: str) -> dict[str, Any]:
    """Returns the tokens and labels of a conversation, or why it has none."""
    attributes = DatasetAttr("file", dataset_name="talks", formatting=formatting, messages="messages", tools="tools")
    tags = {"role": "role", "content": "content", "user": "user", "assistant": "assistant", "system": "system"}
    for tag, name in (tags | ({"observation": "tool"} if formatting == "openai" else {})).items():
        setattr(attributes, f"{tag}_tag", name)
    messages = talk["messages"]
    if formatting == "sharegpt":
        messages = [sharegpt(message, processor.template) for message in messages]
    converter = get_dataset_converter(formatting, attributes, processor.data_args)
    try:
        row = converter({"messages": messages, "tools": json.dumps(talk["tools"]) if talk["tools"] else ""})
        columns = processor.preprocess_dataset({name: [value] for name, value in row.items()})
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if not columns:
        return {"error": "dropped with a warning"}
    return {"tokens": columns["input_ids"][0], "labels": columns["labels"][0]}


def main(source: Path, target: Path) -> None:
    """Encodes the cases of a file. Raises RuntimeError if a tokenizer lacks a token that its template needs."""
    answers = []
    for case in json.loads(source.read_text(encoding="utf-8")):
        tokenizer = AutoTokenizer.from_pretrained(case["tokenizer"])
        settings = DataArguments(template=case["template"], cutoff_len=CUTOFF)
        tokens = len(tokenizer)
        template = get_template_and_fix_tokenizer(tokenizer, settings)
        if len(tokenizer) != tokens:
            raise RuntimeError(f"the tokenizer of {case['template']} lacks one of {template.stop_words}")
        processor = SupervisedDatasetProcessor(template, tokenizer, NO_IMAGES, settings)
        answers.append([encoded(processor, talk, case["formatting"]) for talk in case["talks"]])
    target.write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
