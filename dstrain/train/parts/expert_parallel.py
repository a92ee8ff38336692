"""Expert parallelism (DeepSpeed's AutoEP): the ranks of a group share the experts of each layer, and exchange tokens.

Every rank trains on its own micro-batches. The engine replaces the model's mixtures of experts with its own modules;
a saved model has the names and shapes of the original ones. Source: deepspeed 0.19.8 runtime/engine.py:
_configure_expert_parallel; module_inject/auto_ep_layer.py: AutoEPMoELayer; moe/ep_repack.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep import AutoEP  # type: ignore[import-untyped]
from deepspeed.module_inject.auto_ep_config import parse_autoep_config  # type: ignore[import-untyped]
from deepspeed.module_inject.auto_ep_presets import registry  # type: ignore[import-untyped]
from deepspeed.module_inject.auto_ep_presets.base import (  # type: ignore[import-untyped]
    TransformersTopLevelRouterLogitsAdapter,
)
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout  # type: ignore[import-untyped]
from deepspeed.runtime.zero import GatheredParameters  # type: ignore[import-untyped]
from deepspeed.runtime.zero.partitioned_param_coordinator import (  # type: ignore[import-untyped]
    PartitionedParameterCoordinator,
)
from transformers.utils import output_capturing

from dstrain.errors import InvalidConfig
from dstrain.facts.ds_config import zero_stage
from dstrain.train.checkpoints.saved_model import shape_of
from dstrain.train.parts.parallel import Alone


class ExpertParallel(Alone):
    """Each rank holds some experts of each layer."""

    def begin(self) -> None:
        """Finds the experts. Raises InvalidConfig for a model whose experts DeepSpeed cannot share."""
        find_classes_by_name()
        gather_in_one_order()
        model = self.trainer.model
        self._describe_mixture(model)
        self._specs = self._detect(model)
        self._stored_transposed = {spec.moe_module_name: _is_transposed(model, spec) for spec in self._specs}
        self.trainer.accelerator.get_state_dict = lambda engine: dict(self._whole(engine.module))

    def _describe_mixture(self, model: Any) -> None:
        """Tells DeepSpeed how many experts a token takes in a mixture with a tower: it looks for that in the
        configuration of the whole model, which has it in its text section."""
        if know_mixture_with_tower(model.config.model_type):
            config = self.trainer.accelerator.state.deepspeed_plugin.deepspeed_config
            for sections in (self.trainer.args.hf_deepspeed_config.config, config):
                sections["expert_parallel"]["top_k"] = model.config.get_text_config().num_experts_per_tok

    def _detect(self, model: Any) -> list[Any]:
        """Returns DeepSpeed's descriptions of the layers whose experts are shared."""
        problem = f"ep is {self.trainer.job.ep}, but DeepSpeed cannot share the experts of {type(model).__name__}"
        try:
            section = self.trainer.args.hf_deepspeed_config.config["expert_parallel"]
            specs: list[Any] = AutoEP(model, parse_autoep_config(section)).ep_parser()
        except ValueError as error:
            raise InvalidConfig(f"{problem}: {error}", hint="ep: 1") from error
        if not specs or any(spec.expert_storage != "fused_3d" or spec.expert_w3_name for spec in specs):
            raise InvalidConfig(problem, hint="ep: 1")
        return specs

    @contextmanager
    def saving(self, weights: Mapping[str, Any]) -> Iterator[None]:
        """Context in which the model knows the shapes of experts, which Transformers asks for and it has no longer.

        Source: transformers 5.23 core_model_loading.py: Transpose.convert.
        """
        model = self.trainer.model
        own = model.get_parameter
        model.get_parameter = lambda name: weights[name] if name in weights else own(name)
        try:
            yield
        finally:
            del model.get_parameter

    def part(self, optimizer: Any) -> None:
        """Puts the experts into groups of their own under ZeRO-1 and 2."""
        if zero_stage(self.trainer.args.hf_deepspeed_config.config) < 3:
            part_experts(optimizer, self.trainer.model, self._specs, self.trainer.job.ep)

    def _whole(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all weights under the model's own names in host memory on rank 0, and nothing on other ranks."""
        paths = tuple(f"{spec.moe_module_name}." for spec in self._specs)
        weights = {name: weight for name, weight in _weights(model) if not name.startswith(paths)}
        for spec in self._specs:
            weights |= _replicated(model.get_submodule(spec.moe_module_name), spec)
        for name, weight in weights.items():
            with GatheredParameters([weight]):
                if self.trainer.rank.is_first:
                    yield name, weight.detach().to("cpu", copy=True)
        for spec in self._specs:
            path = f"{spec.moe_module_name}.{spec.experts_name}"
            layer = model.get_submodule(spec.moe_module_name)
            gate, down, up = (
                self._of_group(getattr(layer.experts, name), layer.ep_group) for name in ("w1", "w2", "w3")
            )
            if gate:
                merged = torch.cat([torch.cat(gate), torch.cat(up)], dim=1)  # (experts, 2 * inner, hidden)
                for name, weight in ((spec.expert_w1_name, merged), (spec.expert_w2_name, torch.cat(down))):
                    is_transposed = self._stored_transposed[spec.moe_module_name]
                    yield f"{path}.{name}", weight.transpose(1, 2).contiguous() if is_transposed else weight

    def _of_group(self, weight: Any, group: Any) -> list[torch.Tensor]:
        """Returns the experts of each rank of the first group in host memory on rank 0, and nothing on other ranks."""
        parts = []
        with GatheredParameters([weight]):
            ranks = dist.get_process_group_ranks(group)
            for source in ranks if 0 in ranks else ():
                part = weight.detach().clone() if source == self.trainer.rank.index else torch.empty_like(weight)
                dist.broadcast(part, source, group=group)
                if self.trainer.rank.is_first:
                    parts.append(part.cpu())
        return parts


def part_experts(optimizer: Any, model: Any, specs: Iterable[Any], ep: int) -> None:
    """Puts experts into groups that ZeRO-1 and 2 divide among the ranks that have them.

    Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: _configure_moe_settings.
    """
    modules = [model.get_submodule(f"{spec.moe_module_name}.{spec.experts_name}") for spec in specs]
    experts = {id(weight) for module in modules for weight in module.parameters()}
    for group in list(optimizer.param_groups):
        weights = group["params"]
        if moved := [weight for weight in weights if id(weight) in experts]:
            group["params"] = [weight for weight in weights if id(weight) not in experts]
            optimizer.add_param_group({**group, "params": moved, "moe": True, "name": f"ep_size_{ep}"})


def _weights(module: Any) -> Iterator[tuple[str, Any]]:
    yield from module.state_dict(keep_vars=True).items()


def _replicated(layer: Any, spec: Any) -> dict[str, Any]:
    """Returns the weights of a replaced layer that every rank has, under the names of the original one."""
    router = f"{spec.moe_module_name}.{spec.router_name}"
    weights = {f"{router}.{name}": weight for name, weight in _weights(layer.router.gate)}
    if layer.router.e_score_correction_bias is not None:
        weights[f"{router}.e_score_correction_bias"] = layer.router.e_score_correction_bias
    for name, module in (
        (spec.shared_experts_name, layer.shared_experts),
        (spec.shared_experts_gate_name, layer.shared_experts_gate),
    ):
        if module is not None:
            weights |= {f"{spec.moe_module_name}.{name}.{key}": weight for key, weight in _weights(module)}
    return weights


def _is_transposed(model: Any, spec: Any) -> bool:
    """Returns whether a model has its experts as (experts, inputs, outputs); shared ones are (…, outputs, inputs)."""
    experts = model.get_submodule(f"{spec.moe_module_name}.{spec.experts_name}")
    shapes = (shape_of(getattr(experts, name)) for name in (spec.expert_w1_name, spec.expert_w2_name))
    return bool(classify_fused_gate_up_layout(*shapes).needs_transpose)


def know_mixture_with_tower(model_type: str) -> bool:
    """Lets DeepSpeed find the experts of Qwen3-VL's mixtures, which are Qwen3's below another path; returns
    whether the model is one.

    Source: deepspeed 0.19.8 module_inject/auto_ep_presets/qwen3_moe.py; transformers 5.23 models/qwen3_vl_moe/
    modeling_qwen3_vl_moe.py: Qwen3VLMoeTextSparseMoeBlock.
    """
    name = "qwen3_vl_moe"
    registry.PRESET_MODELS[name] = replace(
        registry.PRESET_MODELS["qwen3_moe"],
        moe_layer_pattern=r"model\.language_model\.layers\.\d+\.mlp",
        preset_adapter=name,
        hf_model_types=(name,),
    )
    registry._PRESET_ADAPTERS[name] = TransformersTopLevelRouterLogitsAdapter(
        display_name="Qwen3-VL-MoE", hf_model_types=(name, f"{name}_text"), class_name_fragments=("Qwen3VLMoe",)
    )
    return model_type == name


def gather_in_one_order() -> None:
    """Makes ZeRO-3 gather parameters in the order of their ids, the same on all ranks.

    DeepSpeed collects the next parameters in a set, ordered by address. Experts are gathered in another
    process group than the rest, so two ranks that begin with different groups wait for each other forever. Source:
    deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py: _fetch_sub_module_impl; partition_parameters.py:
    all_gather_coalesced.
    """
    name = "_PartitionedParameterCoordinator__all_gather_params"
    gather = getattr(PartitionedParameterCoordinator, name)
    if hasattr(gather, "sorts"):
        return

    def gather_sorted(self: Any, params: Iterable[Any], forward: bool) -> None:
        gather(self, sorted(params, key=lambda param: param.ds_id), forward)

    gather_sorted.sorts = True  # type: ignore[attr-defined]
    setattr(PartitionedParameterCoordinator, name, gather_sorted)


def find_classes_by_name() -> None:
    """Lets DeepSpeed look up which outputs a model class records, by the class's name as Transformers 5.0 stored it.

    Transformers 5.23 looks up by model. Source: its utils/output_capturing.py: _CanRecordRegistry; deepspeed 0.19.8
    module_inject/auto_ep_presets/base.py: _retarget_transformers_output_recorders_for_modules.
    """

    registry: Any = output_capturing._CanRecordRegistry

    def name_of(key: Any) -> str:
        return key if isinstance(key, str) else str(key.__class__)

    def get(self: Any, key: Any, default: Any = None) -> Any:
        return dict.get(self, name_of(key)) or ({} if default is None else default)

    def set_item(self: Any, key: Any, value: Any) -> None:
        dict.__setitem__(self, name_of(key), value)

    registry.get, registry.__setitem__ = get, set_item
