"""Compares what carries loss with TRL's training templates and LLaMA-Factory's encoder, for docs/labels.md.

    pip install --target trl-only --no-deps trl==1.16
    python benchmarks/labels.py trl-only/trl/chat_templates --llamafactory peers --json benchmarks/results/labels.json

All sides get the same conversations and a tokenizer of bytes. Ours follows the family's own template; TRL's training
template marks the answers itself, which Transformers reads; LLaMA-Factory has templates of its own. `-v` prints every
difference.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.label_differences import decided, table
from benchmarks.peer_tools import TOOLS as PEERS
from benchmarks.peer_tools import interpreter, versions
from dstrain.choices import LossOn
from dstrain.errors import InvalidConfig
from dstrain.facts.data.turns import Conversation
from dstrain.train.data.rendering import IGNORED
from dstrain.train.data.tokenize import Encoder
from tests.train.data.test_labels import TALKS, TOOL_TALKS, TOOLS, byte_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models, as each tool names it."""

    name: str
    trl: str
    """TRL's name of the template."""
    llamafactory: str | None
    """The name in LLaMA-Factory's `template:`, by its table of models; None: it has none."""
    end: str = "<|im_end|>"
    """The end of a text."""
    others: tuple[str, ...] = ()
    """Tokens of the model that its template does not name."""


FAMILIES = (
    Family(name="Qwen2.5", trl="qwen2_5", llamafactory="qwen"),
    Family(name="Qwen3", trl="qwen3", llamafactory="qwen3"),
    Family(name="Qwen3-2507", trl="qwen3_instruct_2507", llamafactory="qwen3_nothink"),
    Family(name="Qwen3.5", trl="qwen3_5_think", llamafactory="qwen3_5"),
    Family(name="Llama 3", trl="llama3", llamafactory="llama3", end="<|eot_id|>", others=("<|eom_id|>",)),
    Family(name="Gemma 3", trl="gemma3", llamafactory="gemma3"),
    Family(name="Phi-3.5", trl="phi3_5", llamafactory="phi", end="<|endoftext|>"),
    Family(name="GLM-4.5", trl="glm4moe", llamafactory="glm4_moe", end="<|endoftext|>"),
    Family(name="gpt-oss", trl="gptoss", llamafactory="gpt_oss", end="<|return|>"),
    Family(name="DeepSeek-V3", trl="deepseekv3", llamafactory="deepseek3", end="<｜end▁of▁sentence｜>"),
    Family(
        name="DeepSeek-R1 distilled",
        trl="deepseek_r1_distill",
        llamafactory="deepseekr1",
        end="<｜end▁of▁sentence｜>",
    ),
    Family(name="Command R7B", trl="cohere2", llamafactory=None),
    Family(
        name="LFM2",
        trl="lfm2",
        llamafactory="lfm2",
        others=("<|tool_response_start|>", "<|tool_response_end|>"),
    ),
)
CONVERSATIONS = (
    *("one turn", "system", "system, two turns", "thoughts", "thoughts twice", "thoughts at first"),
    *("empty", "empty at first", "quoted ends", "white space", "Chinese, emoji"),
)
CALLS = ("call", "text and call", "calls in two turns", "thoughts")
FORMATS = ("sharegpt", "openai")
"""Formats of LLaMA-Factory's data."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The tokens of a conversation, and the stretches of text that carry loss."""

    tokens: Sequence[int]
    stretches: Sequence[str]
    refusal: str = ""
    """Why the conversation is refused."""

    def shown(self) -> str:
        """Returns the text for -v."""
        return self.refusal or json.dumps(self.stretches, ensure_ascii=False)


def encoding(tokenizer: Any, tokens: Sequence[int], labels: Sequence[int]) -> Encoding:
    """Returns tokens and labels as an encoding."""
    stretches: list[list[int]] = [[]]
    for label in labels:
        if label == IGNORED:
            stretches.append([])
        else:
            stretches[-1].append(label)
    return Encoding(tokens, [tokenizer.decode(stretch) for stretch in stretches if stretch])


def ours(tokenizer: Any, conversation: Conversation) -> Encoding:
    """Returns a conversation as dstrain encodes it with the template of a tokenizer."""
    encoder = Encoder(tokenizer=tokenizer, seq_len=2**16, loss_on=LossOn.ANSWER)
    try:
        (encoded,) = encoder.encode([("", conversation)])
    except InvalidConfig as error:
        return Encoding((), (), f"refused{error.problem}")
    return encoding(tokenizer, encoded.input_ids, encoded.labels)


def differences(here: Encoding, there: Encoding, conversation: Conversation) -> tuple[str, ...] | None:
    """Returns how two encodings differ; None if not only in what docs/labels.md decides."""
    if here.refusal or there.refusal:
        return ("both refuse" if here.refusal and there.refusal else "we refuse" if here.refusal else "it refuses",)
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    calls = {index for index, message in enumerate(answers) if message.get("tool_calls")}
    return decided(here.stretches, there.stretches, calls)


def compared(
    where: str, talks: Mapping[str, Conversation], sides: Sequence[Sequence[Encoding]], *, is_verbose: bool
) -> dict[str, Any]:
    """Returns how many conversations are equal, and how the others differ; prints them, after `where`, if asked."""
    kinds: Counter[str] = Counter()
    row: dict[str, Any] = {"tokens": 0, "labels": 0, "decided": 0, "refused": 0, "undecided": []}
    for title, here, there in zip(talks, *sides, strict=True):
        found = differences(here, there, talks[title])
        is_refused = bool(here.refusal or there.refusal)
        row["tokens"] += here.tokens == there.tokens and not is_refused
        row["labels"] += found == ()
        row["refused"] += is_refused
        row["decided"] += found is not None and not is_refused
        row["undecided"] += [title] if found is None else []
        kinds.update(found or ())
        if is_verbose and found != ():
            print(f"  {where}, {title}: {found}\n    ours   {here.shown()}\n    theirs {there.shown()}")
    return row | {"kinds": dict(kinds)}


def by_llama_factory(
    program: str, tokenizers: Mapping[str, Any], talks: Mapping[str, Conversation]
) -> dict[str, dict[str, list[Encoding]]]:
    """Encodes the conversations with LLaMA-Factory: format of the data → template → encodings."""
    chats = [{"messages": list(talk.messages), "tools": talk.tools} for talk in talks.values()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for template, tokenizer in tokenizers.items():
            tokenizer.save_pretrained(folder / template)
        cases: list[dict[str, Any]] = [
            {"tokenizer": str(folder / template), "template": template, "formatting": formatting, "talks": chats}
            for formatting in FORMATS
            for template in tokenizers
        ]
        (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
        script = str(Path(__file__).with_name("labels_llamafactory.py"))
        files = [str(folder / "cases.json"), str(folder / "answers.json")]
        environment = {**os.environ, "LLAMAFACTORY_VERBOSITY": "ERROR"}
        subprocess.run([program, "-P", script, *files], check=True, env=environment)
        answers = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    encodings: dict[str, dict[str, list[Encoding]]] = {formatting: {} for formatting in FORMATS}
    for case, rows in zip(cases, answers, strict=True):
        tokenizer = tokenizers[case["template"]]
        encodings[case["formatting"]][case["template"]] = [
            Encoding((), (), row["error"]) if "error" in row else encoding(tokenizer, row["tokens"], row["labels"])
            for row in rows
        ]
    return encodings


def parsed() -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("templates", type=Path, help="TRL's folder chat_templates")
    parser.add_argument("--llamafactory", type=Path, help="folder of LLaMA-Factory's environment, made if missing")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every difference")
    return parser.parse_args()


def against_trl(options: argparse.Namespace, talks: Mapping[str, Conversation]) -> tuple[dict[str, Any], ...]:
    """Returns the tokenizer of each family, and the rows of the table."""
    tokenizers: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for family in FAMILIES:
        own, training = (
            byte_tokenizer((options.templates / f"{family.trl}{part}.jinja").read_text("utf-8"), "<s>", family.end)
            for part in ("", "_training")
        )
        own.add_tokens(list(family.others), special_tokens=True)
        tokenizers[family.name] = own
        sides = [[ours(tokenizer, talk) for talk in talks.values()] for tokenizer in (own, training)]
        rows[family.name] = compared(f"TRL, {family.name}", talks, sides, is_verbose=options.verbose)
    return tokenizers, rows


def main() -> None:
    """Prints the tables, and with -v the differences."""
    options = parsed()
    talks = {title: Conversation(messages=TALKS[title]) for title in CONVERSATIONS}
    talks |= {f"tools: {title}": Conversation(messages=TOOL_TALKS[title], tools=TOOLS) for title in CALLS}
    tokenizers, rows = against_trl(options, talks)
    (trl,) = importlib.metadata.distributions(name="trl", path=[str(options.templates.parents[1])])
    releases, tables = {"trl": trl.version}, {"trl": rows}
    if options.llamafactory:
        program = interpreter(PEERS["llamafactory"], options.llamafactory)
        releases |= {name: versions(PEERS["llamafactory"], program)[name] for name in ("llamafactory", "transformers")}
        named = {family.llamafactory: family.name for family in FAMILIES if family.llamafactory}
        inputs = {template: tokenizers[name] for template, name in named.items()}
        own = {template: [ours(tokenizer, talk) for talk in talks.values()] for template, tokenizer in inputs.items()}
        for formatting, encodings in by_llama_factory(program, inputs, talks).items():
            tables[f"llamafactory {formatting}"] = {
                name: compared(
                    f"LLaMA-Factory, {formatting}, {name}",
                    talks,
                    (own[template], encodings[template]),
                    is_verbose=options.verbose,
                )
                for template, name in named.items()
            }
    result = {"versions": releases, "conversations": list(talks), "tables": tables}
    parts = [f"{name}\n\n{table(rows, language)}" for name, rows in tables.items() for language in ("en", "zh")]
    print("\n\n".join(parts))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
