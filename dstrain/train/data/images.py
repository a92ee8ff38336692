"""Images of samples through the model's own processor: their tokens, and the pixels of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.models.auto import video_processing_auto
from transformers.utils.hub import PushToHubMixin, cached_file

from dstrain.errors import InvalidConfig
from dstrain.facts.data import images
from dstrain.facts.model.model_files import PROCESSOR_FILES
from dstrain.facts.model.vision_towers import require_image_package, require_images
from dstrain.job.schema import Job
from dstrain.train.data.chat import Span
from dstrain.train.data.collate import Collator
from dstrain.train.data.image_positions import ImagePositions, positions_of
from dstrain.train.data.tokenize import IGNORED
from dstrain.train.tokenizer import cannot_load

_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which models take the kind of each token: text or image."""
_CROPS = ("crop_to_patches", "do_image_splitting", "do_pan_and_scan")
"""Settings of image processors that cut an image into several. Source: transformers 5.23 image_processing_*.py."""
_BLANK_SIDE = 32


class _NoVideos(PushToHubMixin):
    """Stands for the part of a processor that reads videos and needs torchvision."""

    model_input_names: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns its settings, which are none."""
        return {}

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> _NoVideos:
        """Returns it, whatever the settings of the model."""
        return cls()


@contextmanager
def _without_videos() -> Iterator[None]:
    """Lets Transformers make processors without their part for videos, which are not trained.

    Source: transformers 5.23 processing_utils.py: ProcessorMixin._get_arguments_from_pretrained and __init__.
    """
    part, check = video_processing_auto.AutoVideoProcessor, ProcessorMixin.check_argument_for_proper_class

    def checked(self: Any, name: str, argument: Any) -> Any:
        return _NoVideos if isinstance(argument, _NoVideos) else check(self, name, argument)  # type: ignore[no-untyped-call]

    video_processing_auto.AutoVideoProcessor = _NoVideos  # type: ignore[assignment, misc]
    ProcessorMixin.check_argument_for_proper_class = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        video_processing_auto.AutoVideoProcessor = part  # type: ignore[misc]
        ProcessorMixin.check_argument_for_proper_class = check  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """A rendered conversation with the tokens of its images."""

    input_ids: list[int]
    """Token ids: (seq,)."""
    offsets: Sequence[Span]
    """Characters of each token."""
    spans: Sequence[Span]
    """The characters that count in the loss, at their new places."""
    image_of: Sequence[int | None]
    """Index of the image of each token, None of text: (seq,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Reads images with the processor of a model."""

    family: str
    """The `model_type` of the model."""
    processor: Any
    """A processor of Transformers."""
    max_pixels: int | None
    """Larger images are made smaller, to this many pixels; None: as the processor has it."""
    positions: ImagePositions | None = None
    """Positions of images in packed rows; None: the family has none that are known."""
    files: tuple[Path, ...] = ()
    """The processor's files, which go with the trained model."""

    @property
    def identity(self) -> str:
        """Changes with the tokens of an image."""
        settings = self.processor.image_processor.to_json_string()
        return f"{type(self.processor).__name__} {self.max_pixels} {settings}"

    def expanded(self, text: str, spans: Sequence[Span], paths: Sequence[str]) -> Expanded:
        """Returns the tokens of a rendered conversation, with those of its images in the place of placeholders.

        Raises InvalidConfig if an image is broken, if the template writes another number of placeholders, or if the
        family does not train on images.
        """
        require_images(self.family)
        try:
            out = self.processor(
                text=[text],
                images=[[self._opened(path) for path in paths]],
                return_text_replacement_offsets=True,
                return_offsets_mapping=True,
                add_special_tokens=False,
            )
        except ValueError as error:
            raise InvalidConfig(f"the processor rejects its images: {error}") from None
        replaced = [(*change["span"], *change["new_span"]) for change in out["text_replacement_offsets"][0]]
        offsets = np.asarray(out["offset_mapping"][0]).tolist()
        return Expanded(
            input_ids=_ids(out),
            offsets=offsets,
            spans=[(_moved(start, replaced), _moved(end, replaced)) for start, end in spans],
            image_of=list(_image_of(offsets, replaced)),
        )

    def pixels(self, samples: Sequence[Sequence[str]]) -> dict[str, torch.Tensor]:
        """Returns the tensors that the model takes of the images of each sample, in order."""
        return self._tensors([[self._opened(path) for path in paths] for paths in samples])

    def blank_pixels(self) -> dict[str, torch.Tensor]:
        """Returns the same of a small black image."""
        return self._tensors([[_blank()]], **self._whole)

    def blank_tokens(self, tokenizer: Any) -> list[int]:
        """Returns the tokens of a turn with nothing but a small black image."""
        turn = {"role": "user", "content": [{"type": "image"}]}
        text = tokenizer.apply_chat_template([turn], tokenize=False)
        return _ids(self.processor(text=[text], images=[[_blank()]], add_special_tokens=False, **self._whole))

    def types_of(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns whether tokens are text (0) or an image (1), as the family counts: (batch, seq)."""
        return torch.tensor(self.processor.create_mm_token_type_ids(input_ids.tolist()))

    @property
    def _whole(self) -> dict[str, bool]:
        """Settings under which the processor makes no crops, each of which would be one more image for the tower."""
        return {name: False for name in _CROPS if hasattr(self.processor.image_processor, name)}

    def _tensors(self, samples: list[list[Any]], **options: bool) -> dict[str, torch.Tensor]:
        """Returns what the processor makes of images, with the settings that it has for them in calls with text.

        Source: transformers 5.23 processing_utils.py: ProcessorMixin.__call__.
        """
        known = self.processor.tokenizer.init_kwargs
        settings = self.processor._merge_kwargs(tokenizer_init_kwargs=known, return_tensors="pt", **options)
        made, _ = self.processor._process_images(samples, **settings["images_kwargs"])
        names = {*self.processor.image_processor.model_input_names} - {*self.processor.unused_input_names}
        return {name: value for name, value in made.items() if name in names}

    def _opened(self, path: str) -> Any:
        image = images.opened(path)
        pixels = image.width * image.height
        if self.max_pixels is None or pixels <= self.max_pixels:
            return image
        scale = math.sqrt(self.max_pixels / pixels)
        return image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))


def _ids(out: Mapping[str, Any]) -> list[int]:
    """Returns the tokens that a processor makes of a text; some return tensors, whatever is asked."""
    ids: list[int] = np.asarray(out["input_ids"][0]).tolist()
    return ids


def _blank() -> Any:
    from PIL import Image

    return Image.new("RGB", (_BLANK_SIDE, _BLANK_SIDE))


def image_text(path: str, num_tokens: int) -> str:
    """Returns the size of an image, and the number of its tokens, in words."""
    image = images.opened(path)
    return f"[{Path(images.name_of(path)).name}: {image.width} × {image.height} pixels, {num_tokens:,} tokens]"


def _image_of(offsets: Sequence[Span], replaced: Sequence[tuple[int, int, int, int]]) -> Iterator[int | None]:
    """Yields the index of the image of each token, whose characters stand in a replacement, or None."""
    index = 0
    for start, _ in offsets:
        while index < len(replaced) and start >= replaced[index][3]:
            index += 1
        yield index if index < len(replaced) and start >= replaced[index][2] else None


def _moved(place: int, replaced: Sequence[tuple[int, int, int, int]]) -> int:
    """Returns where a character stands after replacements, given as start and end before and after.

    >>> _moved(9, [(2, 5, 2, 12)])
    16
    """
    return place + sum((new_end - new) - (end - start) for start, end, new, new_end in replaced if end <= place)


def load_images(job: Job, source: str, tokenizer: Any) -> Images | None:
    """Returns the images of a model with a vision tower and a processor; None of a language model.

    Raises InvalidConfig if the processor cannot be loaded, EnvironmentProblem if it lacks a package.
    """
    lenient = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    files = [cached_file(source, name, **lenient) for name in PROCESSOR_FILES]
    if not any(files[:2]):
        return None
    images.require_pillow()
    config = AutoConfig.from_pretrained(source, trust_remote_code=job.trust_remote_code)
    require_image_package(config.model_type)
    try:
        with _without_videos():
            load: Any = AutoProcessor.from_pretrained
            processor = load(source, trust_remote_code=job.trust_remote_code)
    except (OSError, ValueError, ImportError, TypeError, AttributeError) as error:
        raise cannot_load("processor", job, error) from error
    if getattr(processor, "image_processor", None) is None:
        return None
    if job.chat_template is None and isinstance(processor.chat_template, str):
        tokenizer.chat_template = processor.chat_template  # that of the tokenizer may know no images
    processor.tokenizer = tokenizer
    return Images(
        family=config.model_type,
        processor=processor,
        max_pixels=job.max_pixels,
        positions=positions_of(config),
        files=tuple(Path(file) for file in files if file is not None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCollator:
    """Adds the pixels of images to a micro-batch; one without images gets those of a blank image.

    Each rank runs the vision tower in every micro-batch, as ZeRO-3 needs it, which gathers each weight on all ranks at
    once. The tokens of the blank image are padding: no token of a sample sees them, and none of them has a label, so
    that the gradient of the tower is exactly that of the images of other ranks. Packed rows get positions for each
    sample, as the model would count those of a whole row from its beginning.
    """

    collator: Collator
    images: Images
    blank: Sequence[int]
    """Tokens of a blank image."""
    parameters: frozenset[str]
    """Names of the parameters of the model's forward."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the tensors of `Collator`, of the images, and what of the tokens is an image, if the model asks."""
        samples = [row["images"] for row in rows if row.get("images")]
        batch = self.collator(rows) if samples else self._with_blank(rows)
        batch |= self.images.pixels(samples) if samples else self.images.blank_pixels()
        types = next((name for name in _TYPES if name in self.parameters), None)
        if types is not None:
            batch[types] = self.images.types_of(batch["input_ids"])
        if self.collator.packing:
            assert self.images.positions is not None
            batch["position_ids"] = self.images.positions.of(batch)
        return batch

    def _with_blank(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns a micro-batch with a blank image behind its shortest row, which the attention mask hides, or with
        packing its positions: it is a sample with the padding."""
        lengths = [len(row["input_ids"]) for row in rows]
        index = int(np.argmin(lengths))
        longer = {
            **rows[index],
            "input_ids": [*rows[index]["input_ids"], *self.blank],
            "labels": [*rows[index]["labels"], *[IGNORED] * len(self.blank)],
        }
        batch = self.collator([longer if i == index else row for i, row in enumerate(rows)])
        if not self.collator.packing:
            batch["attention_mask"][index, lengths[index] :] = 0
        return batch
