"""Prints which parts of models Liger replaces, and what changes, as JSON: `python -m tests.train.liger_parts CONFIG …`.

A process of its own, as Liger replaces functions and classes of Transformers' modules too. Its kernels are interpreted,
which needs TRITON_INTERPRET=1 from the start.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dstrain.train.model import replace_kernels
from tests.train.interpreting import complete_interpreter


def built(fields: dict[str, Any]) -> Any:
    """Returns a model with weights that are the same every time."""
    auto = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto.from_config(AutoConfig.for_model(**fields))  # type: ignore[no-untyped-call]
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def replaced(model: Any) -> dict[str, bool]:
    """Replaces parts, and returns which: by the names of `FusedParts`, each in all layers or in none."""
    forward, loss = model.forward, torch.nn.functional.cross_entropy
    replace_kernels(model)
    assert model.forward == forward, "the loss is the job's"
    assert torch.nn.functional.cross_entropy is loss, "the loss is the job's"
    modules = [module for layer in model.get_decoder().layers for module in layer.modules()]
    norms = [module for module in modules if "RMSNorm" in type(module).__name__]
    dense = [module for module in modules if hasattr(module, "down_proj") and not hasattr(module, "num_experts")]
    experts = [module for module in modules if hasattr(module, "down_proj") and hasattr(module, "num_experts")]
    rotary = getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None)
    return {
        "norm": _are_all(norms, "LigerRMSNorm"),
        "norm_in_place": all(getattr(norm, "in_place", True) for norm in norms),
        "rotary": rotary is not None and rotary.__module__.startswith("liger_kernel"),
        "mlp": _are_all(dense or experts, "Liger"),
        "experts": bool(experts) and _are_all(experts, "LigerExperts"),
    }


def _are_all(modules: list[Any], name: str) -> bool:
    """Returns whether modules are Liger's, all or none."""
    found = {bool(module._get_name().startswith(name)) for module in modules}
    assert len(found) == 1, [module._get_name() for module in modules]
    return found.pop()


def gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns the loss of a dozen tokens, and the gradient of every parameter that it has."""
    tokens = torch.randint(10, 90, (1, 12), generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    loss = model.train()(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def change(model: Any, launched: set[str]) -> dict[str, Any]:
    """Returns the replaced parts, the kernels that ran, and the relative errors of the loss and of the gradients."""
    loss, grads = gradients(model)
    launched.clear()
    parts = replaced(model)
    loss_now, grads_now = gradients(model)
    errors = [(grads_now[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-12) for name, grad in grads.items()]
    return {
        "parts": parts,
        "kernels": sorted(launched),
        "loss_error": abs(loss_now / loss - 1),
        "gradient_error": max(map(float, errors)),
    }


if __name__ == "__main__":
    kernels = complete_interpreter()
    for path in sys.argv[1:]:
        print(json.dumps(change(built(json.loads(Path(path).read_text())), kernels)), flush=True)
