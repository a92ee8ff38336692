"""Loads the processor of a model, which reads images or videos."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.models.auto import video_processing_auto
from transformers.utils.hub import PushToHubMixin, cached_file

from dstrain.errors import EnvironmentProblem
from dstrain.facts.data import images
from dstrain.facts.model.model_files import PROCESSOR_FILES
from dstrain.facts.model.vision_towers import TRAINS_VIDEOS, require_image_package
from dstrain.job.schema import Job
from dstrain.train.data.image_positions import positions_of
from dstrain.train.data.media_reader import MediaReader
from dstrain.train.data.videos import videos_of
from dstrain.train.tokenizer import cannot_load

_LOAD: Any = AutoProcessor.from_pretrained


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
    """Returns what reads the images of a model with a tower and a processor, or its videos.

    None of a language model. Without a package that the processor needs it refuses what it is to read: data may be
    text alone. Raises InvalidConfig if the processor cannot be loaded.
    """
    lenient = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    files = [cached_file(source, name, **lenient) for name in PROCESSOR_FILES]
    if not any(files[:2]):
        return None
    config = AutoConfig.from_pretrained(source, trust_remote_code=job.trust_remote_code)
    family, saved = config.model_type, tuple(Path(file) for file in files if file is not None)
    try:
        images.require_pillow()
        require_image_package(family)
    except EnvironmentProblem as lack:
        _take_template(ProcessorMixin.get_processor_dict(source)[0].get("chat_template"), job, tokenizer)
        return MediaReader(family=family, processor=None, max_pixels=None, lack=lack, files=saved)
    has_videos = family in TRAINS_VIDEOS and find_spec("torchvision") is not None
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
