"""Vision towers of vision-language models: their facts, and their parameter tensors.

Names of tensors are full names with a star for the block's index, so that none equals a name in a decoder layer.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from dstrain.facts.model.config_fields import Fields
from dstrain.facts.model.model_facts import Kind, TensorGroup, Vision

Groups = list[TensorGroup]


def qwen3_vl_vision(config: Fields) -> Vision:
    """Returns the facts of Qwen 3 VL's tower."""
    tower = config.section("vision_config")
    tower.divided("hidden_size", "num_heads")
    return Vision(
        hidden_size=tower.size("hidden_size"),
        num_layers=tower.size("depth"),
        num_heads=tower.size("num_heads"),
        intermediate_size=tower.size("intermediate_size"),
        patch_size=tower.size("patch_size"),
        spatial_merge_size=tower.size("spatial_merge_size"),
    )


def siglip_vision(config: Fields) -> Vision:
    """Returns the facts of Gemma 3's SigLIP tower, whose patches are pooled to `mm_tokens_per_image`."""
    tower = config.section("vision_config")
    tower.divided("hidden_size", "num_attention_heads")
    patches_per_side = tower.size("image_size") // tower.size("patch_size")
    tokens_per_side = isqrt(config.size("mm_tokens_per_image"))
    if patches_per_side < tokens_per_side:
        raise config.problem("mm_tokens_per_image", f"is more than the {patches_per_side**2} patches of an image")
    return Vision(
        hidden_size=tower.size("hidden_size"),
        num_layers=tower.size("num_hidden_layers"),
        num_heads=tower.size("num_attention_heads"),
        intermediate_size=tower.size("intermediate_size"),
        patch_size=tower.size("patch_size"),
        spatial_merge_size=patches_per_side // tokens_per_side,
        crop_patches=patches_per_side**2,
    )


def qwen3_vl_tower(config: Fields) -> Groups:
    """Returns the tensors of Qwen 3 VL's tower: blocks, the merger at their end, and one at each deepstack level."""
    tower = config.section("vision_config")
    width, inner, depth = tower.size("hidden_size"), tower.size("intermediate_size"), tower.size("depth")
    patch, frames = tower.size("patch_size"), tower.size("temporal_patch_size")
    levels = len(tower.indices("deepstack_visual_indexes"))
    merged = width * tower.size("spatial_merge_size") ** 2
    root, block = "model.visual", "model.visual.blocks.*"
    return [
        *_affine(f"{root}.patch_embed.proj", (width, tower.size("in_channels"), frames, patch, patch), 1),
        _tensor(f"{root}.pos_embed.weight", (tower.size("num_position_embeddings"), width), 1),
        *_affine(f"{block}.norm1", (width,), depth),
        *_affine(f"{block}.norm2", (width,), depth),
        *_linear(f"{block}.attn.qkv", (3 * width, width), depth),
        *_linear(f"{block}.attn.proj", (width, width), depth),
        *_linear(f"{block}.mlp.linear_fc1", (inner, width), depth),
        *_linear(f"{block}.mlp.linear_fc2", (width, inner), depth),
        *_affine(f"{root}.merger.norm", (width,), 1),
        *_merger_mlp(f"{root}.merger", merged, tower.size("out_hidden_size"), 1),
        # a deepstack merger normalizes merged patches, the last merger single ones
        *_affine(f"{root}.deepstack_merger_list.*.norm", (merged,), levels),
        *_merger_mlp(f"{root}.deepstack_merger_list.*", merged, tower.size("out_hidden_size"), levels),
    ]


def siglip_tower(config: Fields) -> Groups:
    """Returns the tensors of Gemma 3's SigLIP tower and of the projector behind it."""
    tower = config.section("vision_config")
    width, inner, depth = tower.size("hidden_size"), tower.size("intermediate_size"), tower.size("num_hidden_layers")
    patch, channels = tower.size("patch_size"), tower.size("num_channels")
    patches = (tower.size("image_size") // patch) ** 2
    root, layer = "model.vision_tower", "model.vision_tower.encoder.layers.*"
    projector, text_width = "model.multi_modal_projector", config.section("text_config").size("hidden_size")
    return [
        *_affine(f"{root}.embeddings.patch_embedding", (width, channels, patch, patch), 1),
        _tensor(f"{root}.embeddings.position_embedding.weight", (patches, width), 1),
        *_affine(f"{layer}.layer_norm1", (width,), depth),
        *_affine(f"{layer}.layer_norm2", (width,), depth),
        *(
            group
            for name in ("q_proj", "k_proj", "v_proj", "out_proj")
            for group in _linear(f"{layer}.self_attn.{name}", (width, width), depth)
        ),
        *_linear(f"{layer}.mlp.fc1", (inner, width), depth),
        *_linear(f"{layer}.mlp.fc2", (width, inner), depth),
        *_affine(f"{root}.post_layernorm", (width,), 1),
        *(_siglip_head(f"{root}.head", width, inner) if tower.flag("vision_use_head") else []),
        # (in, out), multiplied as it is: not a Linear
        _tensor(f"{projector}.mm_input_projection_weight", (width, text_width), 1),
        _tensor(f"{projector}.mm_soft_emb_norm.weight", (width,), 1),
    ]


def _siglip_head(root: str, width: int, inner: int) -> Groups:
    """Returns SigLIP's attention pooling, which Gemma 3's own checkpoints switch off."""
    return [
        _tensor(f"{root}.probe", (1, 1, width), 1),
        _tensor(f"{root}.attention.in_proj_weight", (3 * width, width), 1),
        _tensor(f"{root}.attention.in_proj_bias", (3 * width,), 1),
        *_linear(f"{root}.attention.out_proj", (width, width), 1),
        *_affine(f"{root}.layernorm", (width,), 1),
        *_linear(f"{root}.mlp.fc1", (inner, width), 1),
        *_linear(f"{root}.mlp.fc2", (width, inner), 1),
    ]


def _merger_mlp(root: str, width: int, out: int, count: int) -> Groups:
    return [
        *_linear(f"{root}.linear_fc1", (width, width), count),
        *_linear(f"{root}.linear_fc2", (out, width), count),
    ]


def _tensor(name: str, shape: tuple[int, ...], count: int) -> TensorGroup:
    return frozen(TensorGroup(name=name, kind=Kind.VISION, shape=shape, count=count, is_linear=False))


def _affine(name: str, shape: tuple[int, ...], count: int) -> Groups:
    """Returns weight and bias of a norm or a convolution."""
    return [_tensor(f"{name}.weight", shape, count), _tensor(f"{name}.bias", shape[:1], count)] if count else []


def _linear(name: str, shape: tuple[int, int], count: int) -> Groups:
    weight = TensorGroup(name=f"{name}.weight", kind=Kind.VISION, shape=shape, count=count, is_linear=True)
    return [frozen(weight), _tensor(f"{name}.bias", shape[:1], count)] if count else []


def frozen(group: TensorGroup) -> TensorGroup:
    """Returns a group whose tensors do not train unless a job says so."""
    return replace(group, frozen=tuple(range(group.count)))
