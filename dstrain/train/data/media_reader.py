"""Images and videos of samples through the model's own processor: their tokens, and what a micro-batch has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data import images
from dstrain.facts.data.media import Files, name_of
from dstrain.facts.data.media_kinds import KINDS
from dstrain.facts.data.videos import require_packages
from dstrain.facts.model.vision_towers import require_media
from dstrain.train.data.chat import Span
from dstrain.train.data.image_positions import ImagePositions
from dstrain.train.data.resize import BLANK_SIDE, resized
from dstrain.train.data.token_files import IMAGES, MEDIA
from dstrain.train.data.videos import Videos

_CROPS = ("crop_to_patches", "do_image_splitting", "do_pan_and_scan")
"""Settings of image processors that cut an image into several. Source: transformers 5.23 image_processing_*.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """A rendered conversation with the tokens of its images and videos."""

    input_ids: list[int]
    """Token ids: (seq,)."""
    offsets: Sequence[Span]
    """Characters of each token."""
    spans: Sequence[Span]
    """The characters that count in the loss, at their new places."""
    media_of: Sequence[int | None]
    """Index of the image of each token, or that of the video after all images; None of text: (seq,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaReader:
    """Reads images and videos with the processor of a model."""

    family: str
    """The `model_type` of the model."""
    processor: Any
    """A processor of Transformers; None if a package lacks."""
    max_pixels: int | None
    """Larger images are made smaller, to this many pixels; None: as the processor has it."""
    min_pixels: int | None = None
    """Smaller images are made larger, to this many pixels; None: as the processor has it."""
    videos: Videos | None = None
    """Reads videos; None: the family does not train on them, or a package lacks."""
    positions: ImagePositions | None = None
    """Positions of images in packed rows; None: the family has none that are known."""
    lack: EnvironmentProblem | None = None
    """The package that lacks, without which nothing is read."""
    files: tuple[Path, ...] = ()
    """The processor's files, which go with the trained model."""

    @property
    def identity(self) -> str:
        """Changes with the tokens of an image or a video."""
        readers = [self.processor.image_processor.to_json_string()]
        readers += [self.videos.identity] if self.videos is not None else []
        limits = [str(self.max_pixels), *([] if self.min_pixels is None else [f"from {self.min_pixels}"])]
        return " ".join([type(self.processor).__name__, *limits, *readers])

    def expanded(self, text: str, spans: Sequence[Span], media: Mapping[str, Sequence[Any]]) -> Expanded:
        """Returns the tokens of a rendered conversation, with those of its media in the place of placeholders.

        `media`: column → images or videos. Raises InvalidConfig if one is broken, if the template writes
        another number of placeholders, or if the family does not train on them; EnvironmentProblem if it lacks a
        package.
        """
        named = [column for column in MEDIA if media.get(column)]
        require_media(self.family, named)
        given: dict[str, Any] = {}
        for column in named:
            given |= self._arguments(column, [media[column]])
        try:
            out = self.processor(
                text=[text],
                **given,
                return_text_replacement_offsets=True,
                return_offsets_mapping=True,
                add_special_tokens=False,
            )
        except ValueError as error:
            raise InvalidConfig(f"the processor rejects its {' or '.join(named)}: {error}") from None
        changes = out["text_replacement_offsets"][0]
        replaced = [(*change["span"], *change["new_span"]) for change in changes]
        firsts = accumulate((len(media.get(column, ())) for column in MEDIA), initial=0)
        numbers = {kind.noun: count(first) for kind, first in zip(KINDS, firsts, strict=False)}
        offsets = np.asarray(out["offset_mapping"][0]).tolist()
        return Expanded(
            input_ids=_ids(out),
            offsets=offsets,
            spans=[(_moved(start, replaced), _moved(end, replaced)) for start, end in spans],
            media_of=list(_media_of(offsets, replaced, [next(numbers[change["type"]]) for change in changes])),
        )

    def pixels(self, column: str, samples: Sequence[Sequence[Any]]) -> dict[str, torch.Tensor]:
        """Returns the tensors that the model takes of the images or videos of each sample, in order.

        Without samples they are those of a blank one.
        """
        return self._tensors(column, self._arguments(column, samples))

    def blank_tokens(self, tokenizer: Any, column: str = IMAGES) -> list[int]:
        """Returns the tokens of a turn with nothing but a small black image, or a video of such."""
        turn = {"role": "user", "content": [{"type": column.removesuffix("s")}]}
        text = tokenizer.apply_chat_template([turn], tokenize=False)
        return _ids(self.processor(text=[text], add_special_tokens=False, **self._arguments(column, [])))

    def _arguments(self, column: str, samples: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Returns the arguments of the processor for what samples have, in order; without samples for a blank one.

        Raises InvalidConfig if the family does not train on it, EnvironmentProblem if it lacks a package.
        """
        require_media(self.family, [column])
        if self.lack is not None:
            raise self.lack
        if column == IMAGES:
            opened = [[self._opened(path) for path in paths] for paths in samples]
            return {"images": opened} if samples else {"images": [[_blank()]], **self._whole}
        require_packages()
        assert self.videos is not None
        return self.videos.arguments(samples) if samples else self.videos.blank_arguments()

    def types_of(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns whether tokens are text (0), an image (1) or a video (2), as the family counts: (batch, seq)."""
        return torch.tensor(self.processor.create_mm_token_type_ids(input_ids.tolist()))

    def names(self, images: Sequence[str], videos: Sequence[Files]) -> list[str]:
        """Returns the names of the media of a sample, with size or frames, in words."""
        of_videos = [self.videos.text_of(video) for video in videos] if self.videos else []
        return [*map(image_text, images), *of_videos]

    @property
    def _whole(self) -> dict[str, bool]:
        """Settings under which the processor makes no crops, each of which would be one more image for the tower."""
        return {name: False for name in _CROPS if hasattr(self.processor.image_processor, name)}

    def _tensors(self, column: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Returns what the processor makes of images or videos, with its settings for them in calls with text.

        Source: transformers 5.23 processing_utils.py: ProcessorMixin.__call__.
        """
        known, files = self.processor.tokenizer.init_kwargs, options.pop(column)
        settings = self.processor._merge_kwargs(tokenizer_init_kwargs=known, return_tensors="pt", **options)
        made, _ = getattr(self.processor, f"_process_{column}")(files, **settings[f"{column}_kwargs"])
        unused = {*self.processor.unused_input_names, "video_metadata"}
        return {key: value for key, value in made.items() if key not in unused}

    def _opened(self, path: str) -> Any:
        return resized(images.opened(path), self.max_pixels, self.min_pixels)


def _ids(out: Mapping[str, Any]) -> list[int]:
    """Returns the tokens that a processor makes of a text; some return tensors, whatever is asked."""
    ids: list[int] = np.asarray(out["input_ids"][0]).tolist()
    return ids


def _blank() -> Any:
    from PIL import Image

    return Image.new("RGB", (BLANK_SIDE, BLANK_SIDE))


def image_text(path: str) -> str:
    """Returns the name of an image and its size, in words."""
    image = images.opened(path)
    return f"{Path(name_of(path)).name}: {image.width} × {image.height} pixels"


def _media_of(
    offsets: Sequence[Span], replaced: Sequence[tuple[int, int, int, int]], numbers: Sequence[int]
) -> Iterator[int | None]:
    """Yields the number of the image or video of each token whose characters stand in a replacement, or None."""
    index = 0
    for start, _ in offsets:
        while index < len(replaced) and start >= replaced[index][3]:
            index += 1
        yield numbers[index] if index < len(replaced) and start >= replaced[index][2] else None


def _moved(place: int, replaced: Sequence[tuple[int, int, int, int]]) -> int:
    """Returns where a character stands after replacements, given as start and end before and after.

    >>> _moved(9, [(2, 5, 2, 12)])
    16
    """
    return place + sum((new_end - new) - (end - start) for start, end, new, new_end in replaced if end <= place)
