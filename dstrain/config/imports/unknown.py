"""Judges keys of other tools that no table has, by the words of their names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

_STEMS = (
    # adapters, frozen and trained parts
    *("lora", "qlora", "dora", "peft", "adapter", "prefix", "ptuning", "galore", "pissa"),
    *("freez", "froz", "unfreez", "trainable", "tune", "tuning", "finetun"),
    # quantization, precision
    *("quant", "bits", "nbit", "precision"),
    # what is learned from whom
    *("prefer", "reward", "chosen", "reject", "refer", "distill", "teacher", "rlhf", "advantage", "generations"),
    # lengths, templates, mixtures
    *("length", "cutoff", "truncat", "context", "template", "conv", "chat", "prompt", "system", "instruct"),
    *("mix", "interleav", "proportion", "weight", "sampling", "upsampl", "curricul", "pack"),
    # loss and optimizer
    *("loss", "label", "smooth", "mask", "noise", "neft", "dropout", "regulariz", "optim", "momentum", "schedul"),
    *("warmup", "decay", "epoch", "batch", "accum"),
    # other inputs and parts of a model
    *("image", "video", "audio", "vision", "visual", "pixel", "multimodal", "projector", "tower", "expert", "router"),
)
_WORDS = frozenset(
    (
        *("bit", "int4", "int8", "fp4", "fp8", "nf4", "4bit", "8bit", "awq", "gptq", "hqq", "bnb", "ia3", "oft", "fix"),
        *("dpo", "ipo", "kto", "orpo", "cpo", "simpo", "ppo", "grpo", "rl", "rm", "ref", "beta", "kl", "aux", "lr"),
        *("len", "seq", "ctx", "moe", "mtp", "vit", "mm", "head", "heads", "rope"),
    )
)
_TRAINS = ("tune", "tuning", "train", "trainable", "unfreeze", "unfrozen", "learn", "fit")
_OFF: tuple[Any, ...] = (None, False, 0, "", "no", "none", "false", "off", [], {})


def is_about_training(key: str, value: Any) -> bool:
    """Returns whether the name of a key says that it changes what is trained, and its value asks for something.

    >>> is_about_training("lora_rank", 8), is_about_training("save_path", "x"), is_about_training("use_dora", False)
    (True, False, False)
    """
    words = _words(key)
    speaks = any(word in _WORDS or word.startswith(_STEMS) for word in words)
    plain = value.lower() if isinstance(value, str) else value
    is_off = any(plain == off and isinstance(plain, bool) is isinstance(off, bool) for off in _OFF)
    return speaks and (not is_off or (plain is not None and any(word in _TRAINS for word in words)))


def meant(key: str, known: Iterable[str]) -> str | None:
    """Returns the key of which one has a typing error: all words are the same but one, which is nearly the same.

    >>> meant("cutof_len", ["cutoff_len", "cut_len"]), meant("lora_rank", ["local_rank"])
    ('cutoff_len', None)
    """
    words = _words(key)
    for other in known:
        pairs = [pair for pair in zip(words, _words(other), strict=False) if pair[0] != pair[1]]
        if len(words) == len(_words(other)) and len(pairs) == 1:
            one, two = pairs[0]
            if min(len(one), len(two)) > 3 and difflib.SequenceMatcher(None, one, two).ratio() >= 0.85:
                return other
    return None


def _words(key: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())
