"""Traces images without data: the inputs that processors make, and the towers that run on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from inspect import signature
from math import isqrt, sqrt
from typing import Any
from unittest.mock import patch

import torch

from dstrain.errors import InvalidConfig
from dstrain.facts.model.traces import Question, Subject
from dstrain.facts.workload import seen_samples
from dstrain.train.checkpoints.saved_model import DTYPES
from dstrain.train.data.collate import without_adapter
from dstrain.train.tracing.tracker import StorageTracker

_LEAVE_OUT = "Leave out the image patches: the language model alone can be traced."


def inputs(question: Question, model: Any) -> dict[str, Any]:
    """Returns the inputs that a family's processor adds for the images of a micro-batch, and the model's positions.

    Raises InvalidConfig if images of the family cannot be traced, or not so many patches.
    """
    base, tower, takes = _seeing(model)
    if "image_position_ids" in takes:
        made = _places(question, tower)
    else:
        made = _grids(question, tower) if "image_grid_thw" in takes else _crops(question, base, tower)
    shape = (question.micro_batch, question.seq_len)
    if "token_type_ids" in takes:
        made["token_type_ids"] = whole_numbers(shape)
    if hasattr(base.model, "get_rope_index"):
        # three numbers a token, or four with the data of packed rows
        made["position_ids"] = whole_numbers((3 + question.is_packed, *shape))
    return made


def whole_numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor without data of that shape, as token ids are."""
    return torch.empty(shape, dtype=torch.int64, device="meta")


def sizes(model: Any) -> dict[str, int]:
    """Returns the fields of `Vision` that a tower shows at work, on one image: its patches of a crop and of a token.

    Raises InvalidConfig if images of the family cannot be traced.
    """
    base, tower, takes = _seeing(model)
    if "image_grid_thw" in takes:
        return {}
    if "image_position_ids" in takes:
        return {"patch_size": tower.patch_size, "spatial_merge_size": tower.pooling_kernel_size}
    try:
        side, patch_side = _sides(tower)
        of_crop = (side // patch_side) ** 2
        patches = min(_pinpoints(base.config, side), default=1) * of_crop
        found = {"patch_size": patch_side, "spatial_merge_size": max(1, round(sqrt(patches / _tokens(model, patches))))}
        return found if _takes_any_size(base) else found | {"crop_patches": of_crop}
    except Exception as error:  # code of other people, which may raise anything
        raise InvalidConfig(f"images of {base.config.model_type} cannot be traced: {error}", hint=_LEAVE_OUT) from error


def _tokens(model: Any, patches: int) -> int:
    """Returns the tokens of the language model that an image of so many patches becomes."""
    tokens: list[int] = []
    features = without_adapter(model).model.get_image_features
    takes = signature(features).parameters
    with torch.no_grad(), at_work(model, tokens.append), StorageTracker(round_bytes=1, known=()):
        made = inputs(Question(subject=Subject(config={}), image_patches=patches), model)
        without_adapter(model).model.get_image_features(**{name: made[name] for name in made if name in takes})
    return tokens[0]


@contextmanager
def at_work(model: Any, see: Callable[[int], None]) -> Iterator[None]:
    """Context in which the model runs on meta images; `see` receives their token count.

    Functions of Transformers' `vision_utils` make indices from grids, which keep their data: their results go where the
    pixels are, but for the borders of images, which code looks into. It also looks into sizes, which keep their device.
    """
    base, _, takes = _seeing(model)
    features = base.model.get_image_features
    if "pixel_attention_mask" in takes:
        features = partial(_unpadded, base.model)
    elif "image_position_ids" in takes:
        features = partial(_pooled, base.model, see)
    modules = {sys.modules[type(module).__module__] for module in base.modules()}
    with ExitStack() as stack:
        for module in modules:
            for name, function in list(vars(module).items()):
                if getattr(function, "__module__", None) == "transformers.vision_utils" and name.startswith("get_"):
                    stack.enter_context(patch.object(module, name, _placed(function)))
        stack.enter_context(patch.object(torch, "as_tensor", partial(_stays, torch.as_tensor)))
        counted = _counted(features, see)
        stack.enter_context(patch.object(base.model, "get_image_features", counted))
        yield


def _seeing(model: Any) -> tuple[Any, Any, Any]:
    """Returns the model without its adapter, the config of its tower, and the parameters of its forward pass."""
    base = without_adapter(model)
    tower = getattr(base.config, "vision_config", None)
    takes = signature(base.forward).parameters
    if tower is None or "pixel_values" not in takes or not hasattr(getattr(base, "model", None), "get_image_features"):
        raise InvalidConfig(f"images of {base.config.model_type} cannot be traced", hint=_LEAVE_OUT)
    if not {"image_grid_thw", "image_position_ids"} & set(takes) and not hasattr(tower, "image_size"):
        raise InvalidConfig(f"images of {base.config.model_type} cannot be traced", hint=_LEAVE_OUT)
    return base, tower, takes


def _grids(question: Question, tower: Any) -> dict[str, Any]:
    """Returns one image a sample, as Qwen's processors give them: rows of pixels, and the grid each was cut into."""
    merge = tower.spatial_merge_size
    height, width = grid(question.image_patches, merge)
    numel = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    images = question.micro_batch * _num_samples(question, merge)
    pixels = torch.empty((images * question.image_patches, numel), dtype=DTYPES[question.precision], device="meta")
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]] * images)}


def _places(question: Question, tower: Any) -> dict[str, Any]:
    """Returns one image a sample, as Gemma 4's processor gives it: rows of pixels, and the place of each patch."""
    grid(question.image_patches, tower.pooling_kernel_size)  # refuses other numbers
    shape = (question.micro_batch, question.image_patches)
    pixels = torch.empty((*shape, 3 * tower.patch_size**2), dtype=DTYPES[question.precision], device="meta")
    kinds = whole_numbers((question.micro_batch, question.seq_len))
    return {"pixel_values": pixels, "image_position_ids": whole_numbers((*shape, 2)), "mm_token_type_ids": kinds}


def _num_samples(question: Question, merge: int) -> int:
    """Returns the samples with images of a row: packed rows are full of them."""
    return seen_samples(question.seq_len, question.image_patches, merge**2, is_packed=question.is_packed)


def _crops(question: Question, base: Any, tower: Any) -> dict[str, Any]:
    """Returns an image a sample, as it is for towers without grids: in crops of one size, or of any size itself."""
    config, patches, count = base.config, question.image_patches, question.micro_batch
    dtype = DTYPES[question.precision]
    side, patch_side = _sides(tower)
    channels = getattr(tower, "num_channels", 3)
    if _takes_any_size(base):
        size = [patch_side * length for length in grid(patches, getattr(config, "spatial_merge_size", 1))]
        return _sized((count, channels, *size), size, dtype)
    of_crop = (side // patch_side) ** 2
    crops, rest = divmod(patches, of_crop)
    pinpoints = _pinpoints(config, side)
    if rest or (pinpoints and crops not in pinpoints):
        can = ", ".join(str(number * of_crop) for number in sorted(pinpoints or range(1, 5))[:4])
        raise InvalidConfig(f"images of {config.model_type} are not {patches} patches", hint=f"They are {can}, …")
    if pinpoints:
        return _sized((count, crops, channels, side, side), pinpoints[crops], dtype)
    if "pixel_attention_mask" not in signature(base.forward).parameters:
        return {"pixel_values": torch.empty((count * crops, channels, side, side), dtype=dtype, device="meta")}
    pixels = torch.empty((count, crops, channels, side, side), dtype=dtype, device="meta")
    return {"pixel_values": pixels, "pixel_attention_mask": whole_numbers((count, crops, side, side))}


def _sized(shape: tuple[int, ...], size: list[int], dtype: torch.dtype) -> dict[str, Any]:
    """Returns pixels of a shape, and the height and width of each image, with data: code looks into them."""
    pixels = torch.empty(shape, dtype=dtype, device="meta")
    return {"pixel_values": pixels, "image_sizes": torch.tensor([size] * shape[0])}


def _sides(tower: Any) -> tuple[int, int]:
    """Returns the sides of an image and of a patch, in pixels; some configs have heights and widths."""
    image, patch_size = (size if isinstance(size, int) else size[0] for size in (tower.image_size, tower.patch_size))
    return int(image), int(patch_size)


def _takes_any_size(base: Any) -> bool:
    """Returns whether a tower takes images of any size, as Pixtral's does."""
    size = signature(base.model.get_image_features).parameters.get("image_sizes")
    return size is not None and size.default is size.empty and not hasattr(base.config, "image_grid_pinpoints")


def _pinpoints(config: Any, side: int) -> dict[int, list[int]]:
    """Returns the sizes of images that LLaVA's processors make, by crops of `side` pixels, with one of the whole."""
    pinpoints = getattr(config, "image_grid_pinpoints", None) or []
    return {1 + (height // side) * (width // side): [height, width] for height, width in reversed(pinpoints)}


def grid(patches: int, merge: int) -> tuple[int, int]:
    """Returns the most square grid of that many patches whose sides are multiples of `merge`.

    >>> grid(1024, 2), grid(24, 2)
    ((32, 32), (4, 6))
    """
    blocks, rest = divmod(patches, merge**2)
    if rest or not blocks:
        raise InvalidConfig(f"{patches} image patches are not a multiple of the {merge**2} that become one token")
    height = next(side for side in range(isqrt(blocks), 0, -1) if blocks % side == 0)
    return height * merge, blocks // height * merge


def _unpadded(
    model: Any, pixel_values: torch.Tensor, pixel_attention_mask: torch.Tensor | None = None, **options: Any
) -> Any:
    """Inputs of Idefics 3 and SmolVLM, whose own code looks into pixels for images that are padding.

    Here none is. Source: Transformers 5.23 models/idefics3/modeling_idefics3.py: get_image_features.
    """
    samples, crops, *shape = pixel_values.shape
    pixels = pixel_values.to(dtype=model.dtype).view(samples * crops, *shape)
    real = whole_numbers((samples * crops,))
    pixels = pixels.index_select(0, real)
    if pixel_attention_mask is not None:
        pixel_attention_mask = pixel_attention_mask.view(samples * crops, *shape[1:]).index_select(0, real)
    side = shape[-1] // model.config.vision_config.patch_size
    mask = torch.ones((samples * crops, side, side), dtype=torch.bool)  # with data: code asks whether it is whole
    outputs = model.vision_model(pixel_values=pixels, patch_attention_mask=mask, **{**options, "return_dict": True})
    features = model.connector(outputs.last_hidden_state)
    outputs.pooler_output = [part.reshape(-1, part.shape[-1]) for part in features.split(crops)]
    return outputs


def _pooled(
    model: Any, see: Callable[[int], None], pixel_values: torch.Tensor, image_position_ids: torch.Tensor, **options: Any
) -> Any:
    """Inputs of Gemma 4 for images without padding, whose own code derives token counts from the positions.

    Source: Transformers 5.23 models/gemma4/modeling_gemma4.py: get_image_features.
    """
    images, patches, _ = pixel_values.shape
    tokens = patches // model.config.vision_config.pooling_kernel_size**2
    see(images * tokens)
    outputs = model.vision_tower(pixel_values=pixel_values, pixel_position_ids=image_position_ids, **options)
    outputs.pooler_output = model.embed_vision(inputs_embeds=outputs.last_hidden_state).split(tokens)
    return outputs


def _placed(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def placed(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return tuple(map(_moved, found)) if isinstance(found, tuple) else _moved(found)

    return placed


def _stays(as_tensor: Callable[..., Any], data: Any, dtype: Any = None, device: Any = None) -> Any:
    return as_tensor(data, dtype=dtype)


def _moved(value: Any) -> Any:
    is_border = not isinstance(value, torch.Tensor) or value.dtype is torch.int32
    return value if is_border else value.to("meta")


def _counted(function: Callable[..., Any], see: Callable[[int], None]) -> Callable[..., Any]:
    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        features = found.pooler_output
        see(sum(part.shape[:-1].numel() for part in ([features] if isinstance(features, torch.Tensor) else features)))
        return found

    return counted
