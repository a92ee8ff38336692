"""Images and videos of samples, through the processor of the model: their tokens, positions and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.models.auto import video_processing_auto
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils.hub import PushToHubMixin, cached_file

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data import media
from dstrain.facts.data.columns import IMAGES, KINDS, MEDIA
from dstrain.facts.data.media import Files, name_of, require_packages
from dstrain.facts.model.model_files import PROCESSOR_FILES
from dstrain.facts.model.traits import require_image_package, require_media, traits
from dstrain.job.schema import Job
from dstrain.train.data.chat import Span
from dstrain.train.data.collate import Collator, without_adapter
from dstrain.train.data.rendering import IGNORED
from dstrain.train.data.videos import BLANK_SIDE, Videos, resized, videos_of
from dstrain.train.tokenizer import cannot_load

_CROPS = ("crop_to_patches", "do_image_splitting", "do_pan_and_scan")
"""Settings of image processors that cut an image into several. Source: transformers 5.23 image_processing_*.py."""
_LOAD: Any = AutoProcessor.from_pretrained


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
    """Index of the image of each token, or of its video after all images; None of text: (seq,)."""


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
        readers = [] if self.processor is None else [self.processor.image_processor.to_json_string()]
        readers += [self.videos.identity] if self.videos is not None else []
        limits = [str(self.max_pixels), *([] if self.min_pixels is None else [f"from {self.min_pixels}"])]
        return " ".join([type(self.processor).__name__, *limits, *readers])

    def expanded(self, text: str, spans: Sequence[Span], media: Mapping[str, Sequence[Any]]) -> Expanded:
        """Returns the tokens of a rendered conversation, with tokens of its media in the place of placeholders.

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
        # images are numbered before videos, whatever their order in the text
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

        Without samples they belong to a blank one.
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
        """Returns the processor's output for images or videos, with its settings for them in calls with text.

        Source: transformers 5.23 processing_utils.py: ProcessorMixin.__call__.
        """
        known, files = self.processor.tokenizer.init_kwargs, options.pop(column)
        settings = self.processor._merge_kwargs(tokenizer_init_kwargs=known, return_tensors="pt", **options)
        made, _ = getattr(self.processor, f"_process_{column}")(files, **settings[f"{column}_kwargs"])
        unused = {*self.processor.unused_input_names, "video_metadata"}
        return {key: value for key, value in made.items() if key not in unused}

    def _opened(self, path: str) -> Any:
        return resized(media.opened(path), self.max_pixels, self.min_pixels)


def _ids(out: Mapping[str, Any]) -> list[int]:
    """Returns the tokens that a processor makes of a text; some return tensors, whatever is asked."""
    ids: list[int] = np.asarray(out["input_ids"][0]).tolist()
    return ids


def _blank() -> Any:
    from PIL import Image

    return Image.new("RGB", (BLANK_SIDE, BLANK_SIDE))


def image_text(path: str) -> str:
    """Returns the name of an image and its size, in words."""
    image = media.opened(path)
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
    """Lets Transformers make processors without their part for videos, which some families or machines lack.

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


def load_media_reader(job: Job, source: str, tokenizer: Any) -> MediaReader | None:
    """Returns the reader of images and videos for a model with a tower and a processor.

    None of a language model. Without a package that the processor needs it refuses what it is to read: data may be
    text alone. Raises InvalidConfig if the processor cannot be loaded.
    """
    # a missing file is an answer here: a language model has none of them
    lenient = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    files = [cached_file(source, name, **lenient) for name in PROCESSOR_FILES]
    if not any(files[:2]):
        return None
    config = AutoConfig.from_pretrained(source, trust_remote_code=job.trust_remote_code)
    family, saved = config.model_type, tuple(Path(file) for file in files if file is not None)
    try:
        media.require_pillow()
        require_image_package(family)
    except EnvironmentProblem as lack:
        _take_template(ProcessorMixin.get_processor_dict(source)[0].get("chat_template"), job, tokenizer)
        return MediaReader(family=family, processor=None, max_pixels=None, lack=lack, files=saved)
    has_videos = traits(family).trains_videos and find_spec("torchvision") is not None
    try:
        with nullcontext() if has_videos else _without_videos():
            processor = _LOAD(source, trust_remote_code=job.trust_remote_code)
    except (OSError, ValueError, ImportError, TypeError, AttributeError) as error:
        raise cannot_load("processor", job, error) from error
    if getattr(processor, "image_processor", None) is None:
        return None
    _take_template(processor.chat_template, job, tokenizer)
    processor.tokenizer = tokenizer
    return MediaReader(
        family=family,
        processor=processor,
        max_pixels=job.max_pixels,
        min_pixels=job.min_pixels,
        videos=videos_of(processor, job) if has_videos else None,
        positions=positions_of(config),
        files=saved,
    )


def _take_template(template: Any, job: Job, tokenizer: Any) -> None:
    """Gives a tokenizer the chat template of the processor: its own may know no media."""
    if job.chat_template is None and isinstance(template, str):
        tokenizer.chat_template = template


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePositions:
    """Counts in time, height and width, with the code of a model that has no weights here."""

    model: Any
    """The family's model below its head, without parameters: loaders of data may hold and copy it."""

    @property
    def token_side(self) -> int:
        """Side of the square that becomes one token, in pixels."""
        tower = self.model.config.vision_config
        return int(tower.patch_size * tower.spatial_merge_size)

    def of(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the positions of text, by which attention keeps samples apart, and three for the rotation.

        Of a micro-batch it takes `input_ids`, `position_ids`, which count from 0 in each sample, and
        `mm_token_type_ids` (0 text, 1 image, 2 video): (batch, seq); and what it has of `image_grid_thw` and
        `video_grid_thw`, the frames, rows and columns of patches of each image: (images, 3), and video: (videos, 3).
        Result: (4, batch, seq). The model is asked once for all samples, padded to the longest.
        Source: transformers 5.23 models/qwen3_vl/modeling_qwen3_vl.py: get_rope_index, Qwen3VLTextModel.forward.
        """
        positions = batch["position_ids"]
        flat = positions.reshape(-1)
        # a packed row has many samples, and the model counts positions in rows: each sample becomes a row
        sample = (flat == 0).cumsum(0) - 1
        shape = (int(sample[-1]) + 1, int(flat.max()) + 1)

        def apart(values: torch.Tensor) -> torch.Tensor:
            padded = torch.zeros(shape, dtype=torch.long)
            padded[sample, flat] = values.reshape(-1).long()
            return padded

        rotated, _ = self.model.get_rope_index(
            apart(batch["input_ids"]),
            mm_token_type_ids=apart(batch["mm_token_type_ids"]),
            image_grid_thw=batch.get("image_grid_thw"),
            video_grid_thw=batch.get("video_grid_thw"),
            attention_mask=apart(torch.ones_like(flat)),
        )
        return torch.cat([positions[None], rotated[:, sample, flat].reshape(3, *positions.shape)])


def positions_of(config: Any) -> ImagePositions | None:
    """Returns the positions of a model; None if they are not known of its family."""
    if not traits(config.model_type).packs_images:
        return None
    family: Any = MODEL_MAPPING[type(config)]
    model = family.__new__(family)
    torch.nn.Module.__init__(model)
    model.config = config
    return ImagePositions(model=model)


_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which models take the kind of each token: text, image or video."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaCollator:
    """Adds pixels to a micro-batch; one without any gets a blank image or video.

    Each rank runs a tower as often in every micro-batch, as ZeRO-3 needs it, which gathers each weight on all ranks at
    once: for images, and once more for videos, if the data have both. The tokens of what is blank are padding: no token
    of a sample sees them, and none of them has a label, so that the gradient of the tower comes from the
    images and videos of other ranks alone. Packed rows get positions for each sample where the family has its own for
    images, which the model would count for the whole row from its beginning.
    """

    collator: Collator
    media_reader: MediaReader
    blanks: Mapping[str, Sequence[int]]
    """Columns of images and videos that the data have → tokens of a blank one."""
    parameters: frozenset[str]
    """Names of the parameters of the model's forward."""
    dtype: torch.dtype = torch.float32
    """Dtype of pixels, as of training: the Trainer would cast them in RAM, while the GPU waits."""

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype, **options: Any) -> MediaCollator:
        """Returns the collator of a model, with or without an adapter."""
        return cls(parameters=frozenset(signature(without_adapter(model).forward).parameters), dtype=dtype, **options)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the tensors of `Collator`, of what is seen, and the kinds of tokens, if the model asks."""
        samples = {column: [row[column] for row in rows if row.get(column)] for column in self.blanks}
        lacking = [token for column, blank in self.blanks.items() if not samples[column] for token in blank]
        batch = self._with_blank(rows, lacking) if lacking else self.collator(rows)
        for column in self.blanks:
            seen = self.media_reader.pixels(column, samples[column])
            batch |= {key: self._cast(value) for key, value in seen.items()}
        types = next((name for name in _TYPES if name in self.parameters), None)
        if types is not None:
            batch[types] = self.media_reader.types_of(batch["input_ids"])
        if self.collator.packing and self.media_reader.positions is not None:
            batch["position_ids"] = self.media_reader.positions.of(batch)
        return batch

    def _cast(self, value: Any) -> Any:
        is_cast = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_cast else value

    def _with_blank(self, rows: Sequence[Mapping[str, Any]], blank: Sequence[int]) -> dict[str, Any]:
        """Returns a micro-batch with blank tokens behind its shortest row, which the attention mask hides, or with
        packing its positions: they are a sample with the padding."""
        lengths = [len(row["input_ids"]) for row in rows]
        index = int(np.argmin(lengths))
        longer = {
            **rows[index],
            "input_ids": [*rows[index]["input_ids"], *blank],
            "labels": [*rows[index]["labels"], *[IGNORED] * len(blank)],
        }
        batch = self.collator([longer if i == index else row for i, row in enumerate(rows)])
        if not self.collator.packing:
            batch["attention_mask"][index, lengths[index] :] = 0
        return batch
