"""Orders the modules of a decoder layer by their call."""

from __future__ import annotations

_BEFORE_MLP = ("post_attention_layernorm", "post_self_attn_layernorm", "pre_feedforward_layernorm")
"""Norms of a layer between attention and MLP. Source: Transformers 5.23, modeling code of the families on the tape."""


def call_order(paths: list[str], linears: list[str]) -> list[str]:
    """Returns modules by their call: linear layers as the tape calls them, norms where their names say."""
    place = {name: index for index, name in enumerate(linears)}
    mlp = min((place[path] for path in paths if path in place and path.startswith("mlp")), default=len(linears))

    def key(path: str) -> tuple[float, int]:
        if path in place:
            return (place[path], 0)
        if path == "input_layernorm":
            return (-1, 0)
        if path in _BEFORE_MLP:
            return (mlp - 0.5, _BEFORE_MLP.index(path))
        last = path.rpartition(".")[2].partition("_norm")[0].partition("_layernorm")[0]
        after = [place[linear] for linear in linears if linear.rpartition(".")[2].startswith(last)]
        if "norm" in path and after:
            return (after[0] + 0.25, 0)
        return (len(linears) - (0.25 if path.startswith("mlp") else 0), 0)

    return sorted(paths, key=key)
