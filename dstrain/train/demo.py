"""Makes a tiny model and real data for it, offline: `python -m dstrain.train.demo DIR`.

The data are the functions of Python's standard library: a signature is the question, its docstring the answer. With
`--images` they are pictures and questions about them, of which none tells its answer: a model that gets no pixels can
only guess colors and shapes.
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
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
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


VISION_CHAT_TEMPLATE = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{- m.content }}
{%- else %}{%- for part in m.content %}
{%- if part.type in ('image', 'video') %}{{- '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{% endif %}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML with images and videos as parts of turns. Source: the chat template of Qwen3-VL."""
COLORS = ("red", "green", "blue", "yellow", "purple", "orange")
SHAPES = ("circle", "square", "triangle")
QUESTIONS = {
    "What is in the picture?": "a {color} {shape}",
    "What color is it?": "{color}",
    "Which shape is it?": "{shape}",
}
"""Question → answer."""
NUM_PICTURES = 1536

_TOKENS = {name: f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
_PATCH = 8
"""Side of a patch, in pixels."""
_TEXT = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]},
    "tie_word_embeddings": True,
}
_TOWER = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 128,
    "patch_size": _PATCH,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}


def build_pictures(folder: Path) -> Demo:
    """Writes `model`, `train.jsonl`, `eval.jsonl` and `pictures` to the folder; the same every time."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    chosen = random.Random(SEED)
    samples = [_picture_sample(folder, number, chosen) for number in range(NUM_PICTURES + EVAL_SAMPLES)]
    train, evaluation = samples[EVAL_SAMPLES:], samples[:EVAL_SAMPLES]
    tokenizer = make_vision_tokenizer(turn["content"] for sample in train for turn in sample["messages"])
    model = save_model(folder / "model", tokenizer, text=_TEXT, tower=_TOWER)
    return Demo(
        model=str(folder / "model"),
        train=write_rows(folder / "train.jsonl", train),
        eval=write_rows(folder / "eval.jsonl", evaluation),
        params=model.num_parameters(),
        vocab_size=len(tokenizer),
        train_samples=len(train),
        eval_samples=len(evaluation),
        loss_to_beat=loss_without_pictures(evaluation, tokenizer),
    )


def _picture_sample(folder: Path, number: int, chosen: random.Random) -> dict[str, Any]:
    """Draws a picture and returns a question about it with its answer."""
    color, shape, question = chosen.choice(COLORS), chosen.choice(SHAPES), chosen.choice(list(QUESTIONS))
    name = f"pictures/{number:04}.png"
    _draw(folder / name, color, shape, chosen)
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": QUESTIONS[question].format(color=color, shape=shape)},
    ]
    return {"messages": turns, "images": [name]}


def _draw(file: Path, color: str, shape: str, chosen: random.Random) -> None:
    """Writes a picture of one shape, of random size and place, on black."""
    from PIL import Image, ImageDraw

    width, height = 8 * _PATCH, 6 * _PATCH  # 48 patches, of which four become a token
    picture = Image.new("RGB", (width, height))
    side = chosen.randint(height // 2, 3 * height // 4)
    left, top = chosen.randint(0, width - side - 1), chosen.randint(0, height - side - 1)
    right, bottom = left + side, top + side
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=color)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=color)
    else:
        pen.polygon([(left, bottom), (right, bottom), (left + side // 2, top)], fill=color)
    picture.save(file)


def loss_without_pictures(samples: Iterable[dict[str, Any]], tokenizer: Any) -> float:
    """Returns the entropy of the answers given their questions, in nats per token that counts in the loss.

    It is the loss of the best model that sees no picture, tuned on these very samples: Σ −ln p(answer | question)
    over the tokens of all answers, with their ends of turn.
    """
    rows = list(samples)
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        question, answer = (turn["content"] for turn in row["messages"])
        answers[question][answer] += 1
    nats = -sum(n * math.log(n / given.total()) for given in answers.values() for n in given.values())
    return nats / sum(
        len(sample["labels"]) for sample in labels_of((row["messages"][-1]["content"] for row in rows), tokenizer)
    )


def make_vision_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Returns the demo's tokenizer with the special tokens of Qwen3-VL, trained on the texts."""
    tokenizer = make_tokenizer(texts)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *_TOKENS.values()]})
    tokenizer.chat_template = VISION_CHAT_TEMPLATE
    return tokenizer


def save_model(folder: Path, tokenizer: Any, *, text: dict[str, Any], tower: dict[str, Any]) -> PreTrainedModel:
    """Writes a Qwen3-VL with random weights, its tokenizer and its processor, and returns the model.

    `text` and `tower` are the sizes of its configuration. Leaves the state of other random numbers as it was.
    """
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration  # need Pillow

    ids: dict[str, Any] = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in _TOKENS.items()}
    config = Qwen3VLConfig(
        text_config={"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **text},
        vision_config=tower,
        image_token_id=ids["image_pad_id"],
        video_token_id=ids["video_pad_id"],
        vision_start_token_id=ids["vision_start_id"],
        vision_end_token_id=ids["vision_end_id"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 16 * tower["patch_size"] ** 2 // 4, "longest_edge": 4096}
    Qwen2VLImageProcessorPil(patch_size=tower["patch_size"], size=size).save_pretrained(folder)
    return model


def main() -> None:
    """Builds into the folder named on the command line and prints what was made as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m dstrain.train.demo", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where model, train.jsonl and eval.jsonl are written")
    parser.add_argument("--experts", metavar="N", type=int, default=0, help="experts of each layer; default: none")
    parser.add_argument("--task", type=Task, default=Task.SFT, help="whose data are made")
    parser.add_argument("--images", action="store_true", help="a Qwen3-VL, and questions about pictures")
    given = parser.parse_args()
    with redirect_stdout(sys.stderr):  # libraries that are loaded on the way greet on stdout
        folder = given.folder.resolve()
        made = build_pictures(folder) if given.images else build(folder, num_experts=given.experts, task=given.task)
    print(json.dumps(asdict(made)))


if __name__ == "__main__":
    main()
