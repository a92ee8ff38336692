"""Makes a tiny model and real data for it, offline: `python -m dstrain.train.demo DIR`.

The data are the functions of Python's standard library: a signature is the question, its docstring the answer.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import sys
import sysconfig
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dstrain.choices import Task
from dstrain.errors import EnvironmentProblem
from dstrain.paths import write_atomic
from dstrain.train.data.rendering import IGNORED

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML. Source: the chat templates of Qwen."""

QUESTION = "Write the docstring of this Python function."
"""The request of every sample, before the signature."""

VOCAB_SIZE = 2048
EVAL_SAMPLES = 192
SEED = 0

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data"}
_ANSWER_CHARACTERS = range(20, 600)
_SIGNATURE_CHARACTERS = 400
_FEWEST_PAIRS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The demo's files and figures."""

    model: str
    """Folder of the model and its tokenizer."""
    train: str
    """Training data."""
    eval: str
    """Evaluation data: functions that are not in the training data."""
    params: int
    """Parameters of the model."""
    vocab_size: int
    """Tokens of the tokenizer."""
    train_samples: int
    """Samples in the training data."""
    eval_samples: int
    """Samples in the evaluation data."""
    loss_to_beat: float
    """Nats per token of the evaluation answers for the best model that does not learn what the demo teaches."""


def build(folder: Path, *, num_experts: int = 0, task: Task = Task.SFT) -> Demo:
    """Writes `model`, `train.jsonl` and `eval.jsonl` to the folder; the same bytes every time on the same Python.

    The data fit a task: conversations, texts, or pairs of answers.
    """
    pairs = pairs_of_standard_library()
    if len(pairs) < _FEWEST_PAIRS:
        raise EnvironmentProblem(
            f"{sysconfig.get_path('stdlib')}: only {len(pairs)} documented functions in the sources of this Python",
            hint="Use a Python whose standard library is installed as .py files.",
        )
    samples = [conversation(question, answer) for question, answer in pairs]
    train, evaluation = samples[EVAL_SAMPLES:], samples[:EVAL_SAMPLES]
    for name, part in (("train.jsonl", train), ("eval.jsonl", evaluation)):
        write_rows(folder / name, ROWS[task](part))
    tokenizer = make_tokenizer(message["content"] for sample in train for message in sample["messages"])
    model = make_model(tokenizer, num_experts=num_experts)
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    if task is Task.PRETRAIN:
        # the loss of guessing each token by its frequency: training that does not beat it has learned nothing
        learned = [row["text"] for row in texts(evaluation)]
    else:
        learned = [sample["messages"][-1]["content"] for sample in evaluation]
    return Demo(
        model=str(folder / "model"),
        train=str(folder / "train.jsonl"),
        eval=str(folder / "eval.jsonl"),
        params=model.num_parameters(),
        vocab_size=len(tokenizer),
        train_samples=len(train),
        eval_samples=len(evaluation),
        loss_to_beat=unigram_entropy(labels_of(learned, tokenizer)),
    )


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


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Writes rows as lines of JSON, and returns the path."""
    write_atomic(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(file)


def pairs_of_standard_library() -> list[tuple[str, str]]:
    """Returns (signature, first paragraph of the docstring) of functions, without duplicates, in an order from a
    seed."""
    root = Path(sysconfig.get_path("stdlib"))
    pairs: dict[str, str] = {}
    answers: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            for signature, answer in _documented(path):
                if signature not in pairs and answer not in answers:
                    pairs[signature] = answer
                    answers.add(answer)
    shuffled = list(pairs.items())
    random.Random(SEED).shuffle(shuffled)
    return shuffled


def _documented(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (signature, docstring) of every function in a source file, which is parsed and never run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in _statements(tree):
        owner = f"class {node.name}:\n    " if isinstance(node, ast.ClassDef) else ""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                signature = owner + _signature(child)
                answer = (ast.get_docstring(child) or "").split("\n\n")[0].strip()
                if len(answer) in _ANSWER_CHARACTERS and len(signature) <= _SIGNATURE_CHARACTERS:
                    yield signature, answer


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the module and all its statements, outer blocks first: none is within an expression."""
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            waiting.extend(getattr(node, block, ()))


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    word = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{word} {function.name}({ast.unparse(function.args)}){returns}:"


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with a chat template, trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def make_model(
    tokenizer: Any, *, hidden_size: int = 128, num_hidden_layers: int = 4, num_experts: int = 0
) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """Returns a Qwen3 with random weights, the same every time; leaves the state of other random numbers as it was.

    With experts each is a third as wide as the dense MLP, and a token visits two.
    """
    experts: dict[str, Any] = {
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden_size,
        "norm_topk_prob": True,
    }
    kind: Any = Qwen3MoeConfig if num_experts else Qwen3Config
    config = kind(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **(experts if num_experts else {}),
    )
    # no devices: saving the generators of GPUs would start CUDA
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Qwen3MoeForCausalLM(config) if isinstance(config, Qwen3MoeConfig) else Qwen3ForCausalLM(config)


def unigram_entropy(samples: Iterable[Mapping[str, Sequence[int]]]) -> float:
    """Returns the entropy of the tokens that count in the loss, in nats per token: −Σ p ln p.

    It is the loss of the best model that sees no context, tuned on these very samples. A model with a lower loss on
    data that it was not trained on has learned from context.

    >>> round(unigram_entropy([{"labels": [-100, 5, 6]}, {"labels": [-100, 5, 6]}]), 3)
    0.693
    """
    counts = Counter(label for sample in samples for label in sample["labels"] if label != IGNORED)
    total = counts.total()
    return -sum(count / total * math.log(count / total) for count in counts.values())


def labels_of(texts: Iterable[str], tokenizer: Any) -> Iterator[dict[str, list[int]]]:
    """Yields the tokens of each text with the token that ends it, as labels."""
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        yield {"labels": [*ids, tokenizer.eos_token_id]}


def main() -> None:
    """Builds into the folder named on the command line and prints what was made as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m dstrain.train.demo", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where model, train.jsonl and eval.jsonl are written")
    parser.add_argument("--experts", metavar="N", type=int, default=0, help="experts of each layer; default: none")
    parser.add_argument("--task", type=Task, default=Task.SFT, help="whose data are made")
    given = parser.parse_args()
    with redirect_stdout(sys.stderr):  # libraries that are loaded on the way greet on stdout
        made = build(given.folder.resolve(), num_experts=given.experts, task=given.task)
    print(json.dumps(asdict(made)))


if __name__ == "__main__":
    main()
