"""Images and videos: the names of their columns, parts and marks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Images or videos."""

    article: str
    """The article of its name."""
    noun: str
    """Its name, and that of its mark in a text."""
    columns: tuple[str, ...]
    """Columns with one, or a list of them; the first is also a key of `turns.Message`."""
    types: tuple[str, ...]
    """Types of the parts of a turn."""
    values: tuple[str, ...]
    """Keys of a part that name the file."""
    content: str
    """Media type of its content, in an example."""
    limits: str
    """Keys of the job that hold for all of them."""
    has_frames: bool = False
    """Whether it may be a list of images."""

    @property
    def mark(self) -> str:
        """Its place in a text."""
        return f"<{self.noun}>"


IMAGE = Kind(
    article="an",
    noun="image",
    columns=("images", "image"),
    types=("image", "image_url", "input_image"),
    values=("image", "image_url", "url", "path"),
    content="image/png",
    limits="max_pixels and min_pixels",
)
"""Source: LLaMA-Factory, ms-swift, TRL (columns), Transformers and Qwen (`image`), OpenAI (the other types)."""
VIDEO = Kind(
    article="a",
    noun="video",
    columns=("videos", "video"),
    types=("video", "video_url"),
    values=("video", "video_url", "url", "path"),
    content="video/mp4",
    limits="video_fps, video_maxlen and video_max_pixels",
    has_frames=True,
)
"""Source: LLaMA-Factory, ms-swift (columns), Transformers and Qwen (`video`), vLLM's form of OpenAI's (`video_url`)."""
KINDS = (IMAGE, VIDEO)
COLUMNS = tuple(name for kind in KINDS for name in kind.columns)
