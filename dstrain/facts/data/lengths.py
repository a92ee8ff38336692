"""Lengths of training samples in tokens, from a sample of the rows and the model's tokenizer alone.

Vision patches of images are counted by their sizes, as the model's processor cuts them, without the processor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from dstrain.choices import Hub, LossOn
from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts.data import media
from dstrain.facts.data.datafile import files_of, parsed, reading_of
from dstrain.facts.data.formats import Pair, Reading
from dstrain.facts.data.media import opened_size
from dstrain.facts.data.rows import RowEstimate, Sample, count_rows, joined, spread
from dstrain.facts.data.turns import Conversation
from dstrain.facts.model.hub_config import file_here, model_type
from dstrain.facts.model.model_files import PROCESSOR_FILES
from dstrain.facts.model.traits import traits
from dstrain.facts.workload import RowContents

RENDERED = 64
"""Conversations that are rendered; one takes 1 to 15 ms, with tools and thoughts of earlier answers the most."""
Measure = Callable[[Sequence[Conversation]], Sequence[tuple[int, int] | None]]
"""Returns the tokens of each conversation and those that count in the loss; None for one that the template refuses.

A mark for each image and video is among them."""


_MARKS = 3
"""Tokens of an image or a video in a rendered text, which `Size.of_media` has too but for one: its mark, and
one on each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a sample in tokens."""

    tokens: int
    learned: int
    """Tokens that count in the loss."""
    of_media: int = 0
    """Tokens of images and videos."""
    of_tools: int = 0
    """Tokens of the descriptions of tools as JSON."""
    of_thoughts: int = 0
    """Tokens of thoughts before the last answer."""


def rendered(samples: Sequence[Conversation | str], sizes: Sequence[Size], measure: Measure) -> list[Size]:
    """Returns the sizes as the chat template has them, given those without it.

    Rendered are samples in even distances by their size, the shortest and the longest among them. The template's
    share of the others is the least-squares fit to these over their texts, messages and tools. Texts stay as they are.
    """
    import numpy as np  # here: a plan without data needs none of it

    found = list(sizes)
    chats = sorted((i for i, one in enumerate(samples) if not isinstance(one, str)), key=lambda i: sizes[i].tokens)
    if not chats:
        return found
    step = max(1, (len(chats) - 1) / max(1, RENDERED - 1))
    chosen = sorted({chats[round(number * step)] for number in range(min(RENDERED, len(chats)))})
    measured = dict(zip(chosen, measure([_chat(samples[index]) for index in chosen]), strict=True))
    exact = {index: one for index, one in measured.items() if one is not None}
    if not exact:
        return found
    for index, (tokens, learned) in exact.items():
        of_media = sizes[index].of_media - _MARKS * _num_media(samples[index])
        found[index] = replace(sizes[index], tokens=tokens + max(0, of_media), learned=learned)
    features = np.array([_features(_chat(samples[index]), sizes[index]) for index in chats], float)
    rows = [place for place, index in enumerate(chats) if index in exact]
    before, after = (np.array([[one[i].tokens, one[i].learned] for i in chats], float) for one in (sizes, found))
    added = features @ np.linalg.lstsq(features[rows], (after - before)[rows], rcond=None)[0]
    for place, index in enumerate(chats):
        if index not in exact:
            tokens, learned = (max(1, round(float(number))) for number in before[place] + added[place])
            found[index] = replace(sizes[index], tokens=tokens, learned=min(tokens, learned))
    return found


def _features(sample: Conversation, size: Size) -> tuple[float, ...]:
    """Returns the numbers on which the tokens depend that a template adds."""
    answers = sum(message["role"] == "assistant" for message in sample.messages)
    text = size.tokens - size.of_media
    return 1.0, bool(sample.tools), len(sample.messages), answers, size.of_tools, size.of_thoughts, text


def _num_media(sample: Conversation | str) -> int:
    return 0 if isinstance(sample, str) else sum(len(getattr(sample, name)) for name in sample.media)


def _chat(sample: Conversation | str) -> Conversation:
    assert not isinstance(sample, str)
    return sample


SAMPLED_ROWS = 2000
"""Rows that are read, spread over all files: a share of them is known to 2 percentage points, 19 times of 20."""
MARKS = 2
"""Special tokens that a chat template puts around a message, which it begins with the role's name on a line of its own.
Source: the templates of Qwen3 (`<|im_start|>`, `<|im_end|>`) and Gemma 3; Llama 3.1's have three."""


_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long the samples of a data set are."""

    tokens: tuple[int, ...]
    """Tokens of the sampled rows, shortest first, before any of them is cut."""
    num_samples: int
    """Samples of the whole data set."""
    estimate: RowEstimate | None = None
    """The basis of their number; None if they were counted."""
    target_share: float = 1.0
    """Share of the tokens with a label, 0…1."""
    has_media: bool = False
    """Whether a sampled row has images or videos."""

    def share_longer(self, seq_len: int) -> float:
        """Returns the share of samples that are longer, 0…1.

        >>> Lengths(tokens=(100, 200, 300, 4000), num_samples=8).share_longer(300)
        0.25
        """
        return sum(length > seq_len for length in self.tokens) / len(self.tokens)

    def at(self, share: float) -> int:
        """Returns the length that this share of the samples does not exceed.

        >>> Lengths(tokens=(100, 200, 300, 4000), num_samples=8).at(0.5)
        200
        """
        return self.tokens[max(0, round(share * len(self.tokens)) - 1)]

    def contents(self, seq_len: int) -> RowContents:
        """Returns the contents of rows if longer samples are cut.

        >>> Lengths(tokens=(100, 300, 900), num_samples=3, target_share=0.5).contents(600)
        RowContents(sample_tokens=333.3, attended_tokens=460.0, target_share=0.5)
        """
        cut = [min(length, seq_len) for length in self.tokens]
        return RowContents(
            sample_tokens=round(sum(cut) / len(cut), 1),
            attended_tokens=round(sum(length * length for length in cut) / sum(cut), 1),
            target_share=round(self.target_share, 3),
        )


def mixed(parts: Sequence[Lengths], counts: Sequence[int]) -> Lengths:
    """Returns the lengths of an epoch with so many samples of each data set: as many of its quantiles as its share.

    >>> mixed([Lengths(tokens=(10, 20, 30), num_samples=3), Lengths(tokens=(900,), num_samples=1)], [30, 10]).at(0.7)
    30
    """
    if len(parts) == 1:
        return replace(parts[0], num_samples=counts[0])
    tokens: list[int] = []
    for part, count in zip(parts, counts, strict=True):
        drawn = max(1, round(SAMPLED_ROWS * count / sum(counts)))
        tokens += [part.tokens[(2 * number + 1) * len(part.tokens) // (2 * drawn)] for number in range(drawn)]
    sizes = [count * sum(part.tokens) / len(part.tokens) for part, count in zip(parts, counts, strict=True)]
    targets = sum(size * part.target_share for size, part in zip(sizes, parts, strict=True))
    return Lengths(
        tokens=tuple(sorted(tokens)),
        num_samples=sum(counts),
        estimate=joined([(count, part.estimate) for part, count in zip(parts, counts, strict=True)]),
        target_share=targets / max(1, sum(sizes)),
        has_media=any(part.has_media for part in parts),
    )


@lru_cache(maxsize=1)
def encoder_of(tokenizer: Path) -> Any:
    """Returns the tokenizer of a tokenizer.json. Raises InvalidConfig if it cannot be read."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises this class itself
        raise InvalidConfig(f"{tokenizer}: cannot be read as a tokenizer: {error}") from None


def read_lengths(
    data: str,
    reading: Reading,
    tokenizer: Path,
    *,
    sampled_rows: int = SAMPLED_ROWS,
    loss_on: LossOn = LossOn.ANSWER,
    image_tokens: int | None = None,
    sees: Eye | None = None,
    measure: Measure | None = None,
) -> Lengths:
    """Returns the lengths of the samples of a data file or a glob; `tokenizer` is the model's tokenizer.json.

    `measure` renders some with the chat template, whose share is else the role's name and `MARKS` for each message. A
    pair counts as the longer of its samples; images as `sees` says, or else with videos `image_tokens`. Raises
    InvalidConfig if no row is usable, or if the tokens of media are not known.
    """
    encoder, files = encoder_of(tokenizer), files_of(data)
    rows, counted, uncounted = 0, 0, list[Path]()
    # rows of all files are tokenized together, which takes one call
    usable: list[tuple[str, Sequence[Conversation | str]]] = []
    count = partial(_media_tokens, image_tokens=image_tokens, sees=sees)
    for file in files:
        sampled, number = spread(file, -(-sampled_rows // len(files)))
        counted, uncounted = counted + (number or 0), uncounted + ([file] if number is None else [])
        rows += len(sampled)
        usable += usable_rows(file, sampled, reading)
    if not usable:
        raise InvalidConfig(f"{data}: none of {rows:,} sampled rows is usable", hint="dstrain run names the problems.")
    samples = [(side, where) for where, sides in usable for side in sides]
    sizes = _sizes(encoder, [_texts(side, loss_on, count(side, where)) for side, where in samples])
    sizes = sizes if measure is None else rendered([side for side, _ in samples], sizes, measure)
    each, more = iter(sizes), count_rows(uncounted)
    return Lengths(
        tokens=tuple(sorted(max(next(each).tokens for _ in sides) for _, sides in usable)),
        num_samples=counted + more.number,
        estimate=joined([(counted, None), (more.number, more.estimate)]),
        target_share=sum(size.learned for size in sizes) / max(1, sum(size.tokens for size in sizes)),
        has_media=any(not isinstance(side, str) and side.has_media for side, _ in samples),
    )


def media_in(data: str, reading: Reading) -> list[str]:
    """Returns the columns of images and videos, as far as sampled rows of a data file or a glob have them."""
    found: dict[str, None] = {}
    for file in files_of(data):
        for row in spread(file, SAMPLED_ROWS)[0]:
            if isinstance(row, Sample):
                found |= dict.fromkeys(media.named_in(reading.row(row.row)))
    return list(found)


class Text(NamedTuple):
    """Text of a sample."""

    text: str
    around: int = 0
    """Special tokens around it."""
    is_learned: bool = True
    """Whether its tokens have labels."""
    is_media: bool = False
    """Whether it stands for images or videos."""
    is_tools: bool = False
    """Whether it describes tools."""
    is_thought: bool = False
    """Whether it is a thought before the last answer, which jobs and templates may leave out."""


def usable_rows(
    file: Path, sampled: Sequence[Sample | InvalidConfig], reading: Reading
) -> list[tuple[str, Sequence[Conversation | str]]]:
    """Returns the place of each usable row and what it holds; of a pair two conversations."""
    found: list[tuple[str, Sequence[Conversation | str]]] = []
    rows = [row for row in sampled if isinstance(row, Sample)]
    if not rows:
        return []
    reading = reading_of(str(file), list(rows[0].row), reading)
    for row in rows:
        try:
            sample = parsed(row, reading)
        except InvalidConfig:
            continue
        found.append((row.where, sample.sides if isinstance(sample, Pair) else (sample,)))
    return found


def _media_tokens(sample: Conversation | str, where: str, image_tokens: int | None, sees: Eye | None) -> int:
    """Returns the tokens of the images and videos of a sample. Raises InvalidConfig if they are not known."""
    if isinstance(sample, str) or not sample.has_media:
        return 0
    if sees is not None and (patches := sees.patches_of(sample)) is not None:
        image_tokens = patches // sees.merge**2
    if image_tokens is None:
        problem = (
            f"has {sample.media[0]}, whose tokens the model's processor counts; --image-patches N counts them, too"
        )
        raise InvalidConfig(f"{where}: {problem}")
    return image_tokens


def _texts(sample: Conversation | str, loss_on: LossOn, media_tokens: int) -> list[Text]:
    """Returns the texts of a sample: of each message its role and what it says, which answers are learned with the mark
    that ends them; and one for all of its images and videos, with two special tokens around each."""
    if isinstance(sample, str):
        return [Text(sample, around=1)]  # the end of the document
    texts, last = [], len(sample.messages) - 1
    for index, message in enumerate(sample.messages):
        is_answer = message["role"] == "assistant" and index not in sample.unlearned
        is_learned = loss_on is LossOn.ALL or (is_answer and (loss_on is LossOn.ANSWER or index == last))
        role = f"{message['role']}\n" if index == 0 else f"\n{message['role']}\n"
        texts.append(Text(role, MARKS - 1, is_learned=loss_on is LossOn.ALL))
        thought, said = _said(message)
        if thought:
            texts.append(Text(thought, is_learned=is_learned, is_thought=index < last))
        text = media.without_marks(said) if sample.has_media else said
        texts.append(Text(text, 1, is_learned=is_learned))
    if sample.has_media:
        around = MARKS * sum(len(getattr(sample, name)) for name in sample.media)
        texts.append(Text("", media_tokens + around, is_learned=False, is_media=True))
    if sample.tools:
        tools = json.dumps(list(sample.tools), ensure_ascii=False)
        texts.append(Text(tools, is_learned=loss_on is LossOn.ALL, is_tools=True))
    return texts


def _sizes(encoder: Any, samples: Sequence[Sequence[Text]]) -> list[Size]:
    """Returns the size of each sample, given its texts."""
    every = [text for texts in samples for text in texts]
    encoded = encoder.encode_batch_fast([text.text for text in every], add_special_tokens=False)
    left = iter([len(encoding.ids) + text.around for encoding, text in zip(encoded, every, strict=True)])
    return [_size([(next(left), text) for text in texts]) for texts in samples]


def _size(texts: Sequence[tuple[int, Text]]) -> Size:
    """Returns the size of a sample, given the tokens of its texts."""
    return Size(
        tokens=sum(tokens for tokens, _ in texts),
        learned=sum(tokens for tokens, text in texts if text.is_learned),
        of_media=sum(tokens for tokens, text in texts if text.is_media),
        of_tools=sum(tokens for tokens, text in texts if text.is_tools),
        of_thoughts=sum(tokens for tokens, text in texts if text.is_thought),
    )


def _said(message: dict[str, Any]) -> tuple[str, str]:
    """Returns the thoughts of a message, and all else that it says."""
    calls = message.get("tool_calls")
    calls = json.dumps(calls, ensure_ascii=False) if calls else None
    content = str(message.get("content") or "")
    block = _THOUGHT.match(content) if message["role"] == "assistant" else None
    thought = str(message.get("reasoning_content") or (block[0] if block else ""))
    said = content[block.end() :] if block else content
    return thought, "\n".join(text for text in (said, calls) if text)


_LEAST, _MOST = 56 * 56, 28 * 28 * 1280
"""Pixels of an image. Source: transformers 5.23 models/qwen2_vl/image_processing_qwen2_vl.py: Qwen2VLImageProcessor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eye:
    """How the processor of a model cuts images into patches."""

    patch: int
    """Side of a patch, in pixels."""
    merge: int
    """Side of the square of patches that becomes a token."""
    least: int
    """Pixels of an image at least, as it is cut."""
    most: int
    max_pixels: int | None = None
    """Pixels above which an image is made smaller first, by the job."""
    min_pixels: int | None = None

    def patches_of(self, sample: Conversation | str) -> int | None:
        """Returns the patches of all images of a sample; None if it has videos, or if one cannot be read here."""
        if isinstance(sample, str):
            return 0
        if sample.videos:
            return None
        try:
            return sum(self.of_size(*_opened_size(image)) for image in sample.images)
        except DstrainError:
            return None

    def of_size(self, width: int, height: int) -> int:
        """Returns the patches of an image of so many pixels.

        >>> Eye(patch=16, merge=2, least=65536, most=16777216).of_size(640, 480)
        1200
        """
        for limit, is_beyond in ((self.max_pixels, int.__gt__), (self.min_pixels, int.__lt__)):
            if limit is not None and is_beyond(width * height, limit):
                scale = math.sqrt(limit / (width * height))
                width, height = max(1, int(width * scale)), max(1, int(height * scale))
        wide, high = smart_resize(width, height, factor=self.patch * self.merge, least=self.least, most=self.most)
        return wide * high // self.patch**2


def smart_resize(width: int, height: int, *, factor: int, least: int, most: int) -> tuple[int, int]:
    """Returns the sides of an image as multiples of a factor, between so many pixels.

    Source: transformers 5.23 models/qwen2_vl/image_processing_qwen2_vl.py: smart_resize.
    """
    wide, high = (round(side / factor) * factor for side in (width, height))
    if wide * high > most:
        beta = math.sqrt(width * height / most)
        wide, high = (max(factor, math.floor(side / beta / factor) * factor) for side in (width, height))
    elif wide * high < least:
        beta = math.sqrt(least / (width * height))
        wide, high = (math.ceil(side * beta / factor) * factor for side in (width, height))
    return wide, high


def eye_of(source: str, hub: Hub, *, max_pixels: int | None = None, min_pixels: int | None = None) -> Eye | None:
    """Returns how a model cuts images, given as a folder or by its id; None if its rule is not known, or not here."""
    if not traits(model_type(source, hub)).takes_any_size:
        return None
    settings: dict[str, Any] = {}
    for name in reversed(PROCESSOR_FILES[:2]):
        if (path := file_here(source, hub, name)) is not None:
            found = json.loads(path.read_text(encoding="utf-8"))
            settings |= found.get("image_processor", found)
    if not settings:
        return None
    least, most = _pixels(settings)
    patch, merge = (int(settings.get(name, default)) for name, default in (("patch_size", 14), ("merge_size", 2)))
    return Eye(patch=patch, merge=merge, least=least, most=most, max_pixels=max_pixels, min_pixels=min_pixels)


def _pixels(settings: Mapping[str, Any]) -> tuple[int, int]:
    size = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge") or _LEAST
    return int(least), int(settings.get("max_pixels") or size.get("longest_edge") or _MOST)


_opened_size = lru_cache(maxsize=4096)(opened_size)
