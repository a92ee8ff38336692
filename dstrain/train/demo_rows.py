"""Rows of the demo's data for each task, from functions of Python's standard library and their docstrings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dstrain.choices import Task

QUESTION = "Write the docstring of this Python function."
"""The request of every sample, before the signature."""


def conversation(question: str, answer: str) -> dict[str, Any]:
    """Returns a function and its docstring as a question and its answer."""
    return {
        "messages": [
            {"role": "user", "content": f"{QUESTION}\n{question}"},
            {"role": "assistant", "content": answer},
        ]
    }


def _pairs(samples: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields pairs: the docstring of each function, and as the rejected answer its words from last to first."""
    for sample in samples:
        question, answer = sample["messages"]
        backwards = " ".join(answer["content"].split()[::-1])
        yield {"prompt": [question], "chosen": [answer], "rejected": [{**answer, "content": backwards}]}


def texts(samples: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields functions with their docstrings, as texts."""
    for sample in samples:
        question, answer = sample["messages"]
        signature = question["content"].removeprefix(f"{QUESTION}\n")
        yield {"text": f'{signature}\n    """{answer["content"]}"""'}


ROWS: Mapping[Task, Callable[[Sequence[dict[str, Any]]], Iterable[dict[str, Any]]]] = MappingProxyType(
    {Task.SFT: list, Task.PRETRAIN: texts, Task.DPO: _pairs}
)
"""The rows of a task's data, from conversations."""
