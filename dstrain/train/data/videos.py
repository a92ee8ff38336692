"""Frames of videos as the model's own processor samples them, with the times between them, and the sizes of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.video_utils import VideoMetadata

from dstrain.facts.data import media
from dstrain.facts.data.media import Files, name_of
from dstrain.job.schema import Job

BLANK_SIDE = 32
"""Side of a blank image, in pixels."""


def resized(image: Any, max_pixels: int | None, min_pixels: int | None = None) -> Any:
    """Returns an image of Pillow with at most and at least so many pixels, as its sides allow; None: as it is.

    Source: LLaMA-Factory 0.9 data/mm_plugin.py: MMPluginMixin._preprocess_image.
    """
    for limit, is_beyond in ((max_pixels, int.__gt__), (min_pixels, int.__lt__)):
        pixels = image.width * image.height
        if limit is not None and is_beyond(pixels, limit):
            scale = math.sqrt(limit / pixels)
            image = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
    return image


_FPS = 2.0
"""Frames per second of a processor that names none. Source: qwen-vl-utils 0.0.14 vision_process.py: FPS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Videos:
    """Reads videos with the processor of a model."""

    processor: Any
    """A video processor of Transformers, with the limits of the job."""
    max_pixels: int | None
    """Larger frames are made smaller, to this many pixels; None: as the processor has it."""

    @property
    def identity(self) -> str:
        """Changes with the tokens of a video."""
        return f"{self.max_pixels} {self.processor.to_json_string()}"

    def arguments(self, samples: Sequence[Sequence[Files]]) -> dict[str, Any]:
        """Returns the arguments of the model's processor for the videos of samples, in order.

        Raises InvalidConfig if one is broken.
        """
        read = [self._read(video) for sample in samples for video in sample]
        return _arguments(read)

    def blank_arguments(self) -> dict[str, Any]:
        """Returns the same of a small black video, as short as the tower takes it."""
        count = getattr(self.processor, "temporal_patch_size", 1)
        frames = np.zeros((count, BLANK_SIDE, BLANK_SIDE, 3), np.uint8)
        metadata = VideoMetadata(total_num_frames=count, fps=self.processor.fps, frames_indices=list(range(count)))
        return _arguments([(frames, metadata)])

    def text_of(self, video: Files) -> str:
        """Returns the name of a video, its size, and its frames, in words."""
        header, indices = self._sampled(video)
        name = name_of(video[0], "video").rpartition("/")[2]
        more = " …" if len(video) > 1 else ""
        size = f"{header.width} × {header.height} pixels"
        return f"{name}{more}: {len(indices):,} of {header.num_frames:,} frames of {size}"

    def _read(self, video: Files) -> tuple[Any, VideoMetadata]:
        """Returns the chosen frames of a video, (frames, height, width, channels), and which these are."""
        header, indices = self._sampled(video)
        frames = [np.asarray(resized(frame, self.max_pixels)) for frame in media.frames_of(video, indices)]
        metadata = VideoMetadata(
            total_num_frames=header.num_frames, fps=header.fps or self.processor.fps, frames_indices=indices
        )
        return np.stack(frames), metadata

    def _sampled(self, video: Files) -> tuple[media.Header, list[int]]:
        """Returns the header of a video, and the numbers of the frames that the processor chooses.

        Frames in image files have been chosen already, at as many per second as the processor takes; more than its
        maximum are thinned out. Source: transformers 5.23 video_processing_utils.py: preprocess.
        """
        header, reader = media.header_of(video), self.processor
        settings = {name: getattr(reader, name, None) for name in reader.valid_kwargs.__annotations__}
        if header.fps is None:
            if header.num_frames <= reader.max_frames:
                return header, list(range(header.num_frames))
            settings |= {"fps": None, "num_frames": reader.max_frames}
        metadata = VideoMetadata(total_num_frames=header.num_frames, fps=header.fps)
        indices = reader.sample_frames(metadata=metadata, **settings)
        return header, [int(index) for index in indices]


def _arguments(read: Sequence[tuple[Any, VideoMetadata]]) -> dict[str, Any]:
    return {
        "videos": [frames for frames, _ in read],
        "video_metadata": [metadata for _, metadata in read],
        "do_sample_frames": False,
    }


def videos_of(processor: Any, job: Job) -> Videos:
    """Returns the videos of a model's processor, whose settings the job replaces."""
    reader = processor.video_processor
    reader.fps = job.video_fps or getattr(reader, "fps", None) or _FPS
    reader.max_frames = job.video_maxlen or reader.max_frames
    if getattr(reader, "cap_pixels_per_frame", False) is None:
        reader.cap_pixels_per_frame = False  # what None means, without a warning from each process
    return Videos(processor=reader, max_pixels=job.video_max_pixels or job.max_pixels)
