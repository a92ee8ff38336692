"""Images and videos of samples through the model's own processor: their tokens, and the pixels of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dstrain.errors import InvalidConfig
from dstrain.facts.data import images
from dstrain.facts.data.media import IMAGE, VIDEO, Files, name_of
from dstrain.facts.data.videos import require_packages
from dstrain.facts.model.vision_towers import require_images, require_videos
from dstrain.train.data.chat import Span
from dstrain.train.data.image_positions import ImagePositions
from dstrain.train.data.resize import BLANK_SIDE, shrunk
from dstrain.train.data.token_files import IMAGES, VIDEOS
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
    """Index of the image of each token, or that of the video after the number of images, None of text: (seq,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Reads images and videos with the processor of a model."""

    family: str
    """The `model_type` of the model."""
    processor: Any
    """A processor of Transformers."""
    max_pixels: int | None
    """Larger images are made smaller, to this many pixels; None: as the processor has it."""
    videos: Videos | None = None
    """Reads videos; None: the family does not train on them, or a package lacks."""
    positions: ImagePositions | None = None
    """Positions of images in packed rows; None: the family has none that are known."""
    files: tuple[Path, ...] = ()
    """The processor's files, which go with the trained model."""

    @property
    def identity(self) -> str:
        """Changes with the tokens of an image or a video."""
        settings = self.processor.image_processor.to_json_string()
        of_videos = f" {self.videos.identity}" if self.videos else ""
        return f"{type(self.processor).__name__} {self.max_pixels} {settings}{of_videos}"

    def expanded(
        self, text: str, spans: Sequence[Span], paths: Sequence[str], videos: Sequence[Files] = ()
    ) -> Expanded:
        """Returns the tokens of a rendered conversation, with those of images and videos in the place of placeholders.

        Raises InvalidConfig if one is broken, if the template writes another number of placeholders, or if the family
        does not train on them; EnvironmentProblem if it lacks a package.
        """
        require_images(self.family)
        given: dict[str, Any] = {"images": [[self._opened(path) for path in paths]]} if paths else {}
        given |= self._videos().arguments([videos]) if videos else {}
        try:
            out = self.processor(
                text=[text],
                **given,
                return_text_replacement_offsets=True,
                return_offsets_mapping=True,
                add_special_tokens=False,
            )
        except ValueError as error:
            what = f"{IMAGES if paths else ''}{' or ' if paths and videos else ''}{VIDEOS if videos else ''}"
            raise InvalidConfig(f"the processor rejects its {what}: {error}") from None
        changes = out["text_replacement_offsets"][0]
        replaced = [(*change["span"], *change["new_span"]) for change in changes]
        numbers = {IMAGE.noun: count(), VIDEO.noun: count(len(paths))}
        offsets = np.asarray(out["offset_mapping"][0]).tolist()
        return Expanded(
            input_ids=_ids(out),
            offsets=offsets,
            spans=[(_moved(start, replaced), _moved(end, replaced)) for start, end in spans],
            media_of=list(_media_of(offsets, replaced, [next(numbers[change["type"]]) for change in changes])),
        )

    def pixels(self, column: str, samples: Sequence[Sequence[Any]]) -> dict[str, torch.Tensor]:
        """Returns the tensors that the model takes of the images or the videos of each sample, in order.

        Without samples they are those of a blank one.
        """
        if column == VIDEOS:
            reader = self._videos()
            return self._tensors("video", reader.arguments(samples) if samples else reader.blank_arguments())
        if not samples:
            return self._tensors("image", {"images": [[_blank()]], **self._whole})
        return self._tensors("image", {"images": [[self._opened(path) for path in paths] for paths in samples]})

    def blank_tokens(self, tokenizer: Any, column: str = IMAGES) -> list[int]:
        """Returns the tokens of a turn with nothing but a small black image, or a video of such."""
        noun = column.removesuffix("s")
        turn = {"role": "user", "content": [{"type": noun}]}
        text = tokenizer.apply_chat_template([turn], tokenize=False)
        blank = {"images": [[_blank()]], **self._whole} if column == IMAGES else self._videos().blank_arguments()
        return _ids(self.processor(text=[text], add_special_tokens=False, **blank))

    def types_of(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns whether tokens are text (0), an image (1) or a video (2), as the family counts: (batch, seq)."""
        return torch.tensor(self.processor.create_mm_token_type_ids(input_ids.tolist()))

    def video_text(self, video: Files) -> str:
        """Returns the name of a video, its size, and its frames, in words."""
        return self._videos().text_of(video)

    def _videos(self) -> Videos:
        """Returns what reads videos. Raises InvalidConfig or EnvironmentProblem if nothing does."""
        require_videos(self.family)
        require_packages()
        assert self.videos is not None
        return self.videos

    @property
    def _whole(self) -> dict[str, bool]:
        """Settings under which the processor makes no crops, each of which would be one more image for the tower."""
        return {name: False for name in _CROPS if hasattr(self.processor.image_processor, name)}

    def _tensors(self, noun: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Returns what the processor makes of images or videos, with its settings for them in calls with text.

        Source: transformers 5.23 processing_utils.py: ProcessorMixin.__call__.
        """
        known, files = self.processor.tokenizer.init_kwargs, options.pop(f"{noun}s")
        settings = self.processor._merge_kwargs(tokenizer_init_kwargs=known, return_tensors="pt", **options)
        process = getattr(self.processor, f"_process_{noun}s")
        made, _ = process(files, **settings[f"{noun}s_kwargs"])
        reader = getattr(self.processor, f"{noun}_processor")
        names = {*reader.model_input_names} - {*self.processor.unused_input_names}
        return {name: value for name, value in made.items() if name in names}

    def _opened(self, path: str) -> Any:
        return shrunk(images.opened(path), self.max_pixels)


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
    """Yields the number of the image or video of each token, whose characters stand in a replacement, or None."""
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
