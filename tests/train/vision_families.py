"""Tiny random models of vision-language families, with the processors that the hub has for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dstrain.facts.model.traits import traits
from dstrain.train.checkpoints.saved_model import family_of
from dstrain.train.demo import make_tokenizer
from tests.train.tiny import sizes

SIDE = 8
"""Side of a tower's patch, in pixels."""
_TEXT = sizes(64, heads=4, max_position_embeddings=512)
_ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": SIDE,
}
_QWEN_SIZE = {"patch_size": SIDE, "size": {"shortest_edge": 256, "longest_edge": 4096}}
_SIZE = {"height": 32, "width": 32}
_TURNS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{- m.content }}
{%- else %}{%- for part in m.content %}
{%- if part.type == 'image' %}{{- 'IMAGE' }}
{%- else %}{{- part.text }}{% endif %}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML, in which IMAGE stands for the text of an image."""
_ONLY_PARTS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- for part in m.content %}
{%- if part.type == 'image' %}{{- 'IMAGE' }}
{%- elif part.type == 'text' %}{{- part.text }}{% endif %}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""The same for contents that are lists of parts, and silent about others. Source: Idefics 3's template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a family's repository has, in small."""

    mark: str
    """The text that its template writes for an image."""
    reader: tuple[str, Mapping[str, Any]]
    """Class and settings of its image processor."""
    ids: Mapping[str, str]
    """Field of its configuration → token."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Attribute of its tokenizer → token."""
    others: tuple[str, ...] = ()
    """More special tokens."""
    processor: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its processor."""
    tower: Mapping[str, Any]
    text: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    template: str = _TURNS
    has_own_template: bool = False
    """Whether the template is the processor's, and that of the tokenizer knows no images."""


_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_GLM_IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER, "image_size": 32, "patch_size": SIDE}
ALL: dict[str, Family] = {
    "qwen2_5_vl": Family(
        mark="<|vision_start|><|image_pad|><|vision_end|>",
        reader=("Qwen2VLImageProcessor", _QWEN_SIZE),
        ids=_QWEN_IDS,
        tower={**_QWEN_TOWER, "window_size": 32, "fullatt_block_indexes": [1]},
        text=_ROTATED,
    ),
    "glm4v": Family(
        mark="<|begin_of_image|><|image|><|end_of_image|>",
        reader=("Glm4vImageProcessor", _QWEN_SIZE | {"size": {"shortest_edge": 512, "longest_edge": 8192}}),
        ids=_GLM_IDS,
        tower={**_QWEN_TOWER, "image_size": 32},
        text=_ROTATED,
    ),
    "gemma3": Family(
        mark="<start_of_image>",
        reader=("Gemma3ImageProcessor", {"size": _SIZE}),
        ids={
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        names={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        processor={"image_seq_length": 4},
        tower={**_SIGLIP, "vision_use_head": False},
        text={"query_pre_attn_scalar": 16, "sliding_window": 32},
        config={"mm_tokens_per_image": 4},
    ),
    "internvl": Family(
        mark="<IMG_CONTEXT>",
        reader=("GotOcr2ImageProcessor", {"size": _SIZE, "max_patches": 4}),
        ids={"image_token_id": "<IMG_CONTEXT>"},
        names={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        processor={"image_seq_length": 4},
        tower={**_TOWER, "image_size": [32, 32], "patch_size": [SIDE, SIDE]},
        text={"model_type": "qwen2"},
        config={"image_seq_length": 4},
    ),
    "llava_onevision": Family(
        mark="<image>\n",
        reader=(
            "LlavaOnevisionImageProcessor",
            {"size": _SIZE, "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
        ),
        ids={"image_token_index": "<image>", "video_token_index": "<video>"},
        processor={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        tower={**_SIGLIP, "vision_use_head": False},
        text={"model_type": "qwen2"},
        config={"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
        has_own_template=True,
    ),
    "idefics3": Family(
        mark="<image>",
        reader=(
            "Idefics3ImageProcessor",
            {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        ),
        ids={"image_token_id": "<image>"},
        others=(
            *("<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
            *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
        ),
        processor={"image_seq_len": 4},
        tower={**_TOWER, "image_size": 32, "patch_size": SIDE},
        text={"model_type": "llama"},
        template=_ONLY_PARTS,
    ),
    "mistral3": Family(
        mark="[IMG]",
        reader=("PixtralImageProcessor", {"patch_size": SIDE, "size": {"longest_edge": 64}}),
        ids={"image_token_index": "[IMG]"},
        others=("[IMG_BREAK]", "[IMG_END]"),
        processor={
            "patch_size": SIDE,
            "spatial_merge_size": 2,
        },
        tower={"model_type": "pixtral", **_TOWER, "head_dim": 16, "image_size": 64, "patch_size": SIDE},
        text={"model_type": "mistral"},
    ),
}
ALL["smolvlm"] = replace(ALL["idefics3"], reader=("SmolVLMImageProcessor", ALL["idefics3"].reader[1]))
FAMILIES = {name: family for name, family in ALL.items() if find_spec(traits(name).image_package or "PIL")}
"""`model_type` → family whose packages are installed."""


def make_family(name: str, folder: Path) -> Path:
    """Writes a model of a family, its tokenizer and its processor."""
    return make_model(name, FAMILIES[name], folder)


def make_model(name: str, family: Family, folder: Path) -> Path:
    """Writes the same, given the family."""
    tokenizer = _tokenizer(family)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in family.ids.items()}
    text = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = config_of(name, family, ids, text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family_of(config).from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)  # so that images matter
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reader, settings = family.reader
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": reader, **settings}))
    if family.has_own_template:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": _template(family)}))
    if family.processor:
        (folder / "processor_config.json").write_text(json.dumps(dict(family.processor)))
    return folder


def config_of(name: str, family: Family, ids: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    """Returns the configuration of a tiny model, given the ids of special tokens and more of its language model."""
    kind: Any = CONFIG_MAPPING[name]
    text_config = {**_TEXT, **family.text, **text}
    return kind(text_config=text_config, vision_config=dict(family.tower), **ids, **family.config)


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    made = make_tokenizer(["What is this? It is red, green, blue or white"] * 4)
    made.add_tokens([*family.ids.values(), *family.names.values(), *family.others], special_tokens=True)
    made._set_model_specific_special_tokens(special_tokens=dict(family.names))
    if not family.has_own_template:
        made.chat_template = _template(family)
    return made


def _template(family: Family) -> str:
    return family.template.replace("IMAGE", family.mark.replace("\n", "\\n"))
