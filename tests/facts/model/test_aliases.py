"""The shipped models: their names, and their sizes against the published ones."""

from collections import Counter

import pytest

from dstrain.facts import probe
from dstrain.facts.model import aliases, families, tracer
from dstrain.facts.model.families import from_config
from dstrain.facts.model.model_facts import Kind
from dstrain.facts.model.tracer import from_description
from dstrain.facts.model.traces import Description, Question, Subject, Wanted

# Parameters in the safetensors of each hub page (`"parameters"` of its index, or "Model size" on the page).
_PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "glm-4-9b": 9_399_951_360,
    "glm-4-9b-0414": 9_400_279_040,
    "phi-4": 14_659_507_200,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
}

# The same of models whose layers are traced, without their vision tower; None: not found.
_TRACED = {
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-9b": None,
    "qwen3.5-27b": None,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}

# 58 layers' routers have a correction bias for each of 256 experts: in the checkpoint, but not trained by gradient.
_BUFFERS = {"deepseek-v3": 58 * 256}


def entry(name: str) -> tuple[str, aliases.Entry]:
    found = aliases.resolve(name)
    assert found is not None, name
    return found


def num_params(name: str) -> int:
    alias, found = entry(name)
    return from_config(found.config, name=alias, source=found.hub_id).num_params


@pytest.mark.parametrize("alias", _PUBLISHED)
def test_the_count_is_the_published_one(alias: str) -> None:
    assert num_params(alias) + _BUFFERS.get(alias, 0) == _PUBLISHED[alias]


@pytest.mark.engine
def test_models_whose_layers_are_traced_are_built_by_transformers() -> None:
    assert set(aliases.known()) == {*families.known(), *_TRACED}
    configs = [dict(entry(name)[1].config) for name in _TRACED]
    asked = [Question(subject=Subject(config=config), wanted=Wanted.DESCRIPTION) for config in configs]
    for (name, published), answer in zip(_TRACED.items(), tracer.ask(asked), strict=True):
        assert isinstance(answer, Description), answer
        model = from_description(answer, name=name, source=name)
        assert published in (None, model.num_params - model.num_params_of(Kind.VISION)), name


def test_mistral_7b_v01_has_the_smaller_vocabulary_and_a_window() -> None:
    assert num_params("mistralai/Mistral-7B-v0.1") == 7_241_732_096
    assert [probe.read_model(f"mistralai/Mistral-7B-v0.{n}").sliding_window for n in (1, 3)] == [4096, None]


@pytest.mark.parametrize("alias", families.known())
def test_a_window_is_that_of_the_checkpoint_and_not_the_default_of_its_family(alias: str) -> None:
    config = entry(alias)[1].config
    rule = families.FAMILIES[str(config["model_type"])].windows
    has_default = rule is not None and rule.default is not None and not rule.is_switched
    assert not has_default or "sliding_window" in {**config, **dict(config.get("text_config") or {})}


@pytest.mark.parametrize("alias", aliases.known())
def test_an_alias_and_its_hub_id_resolve_to_it_and_it_has_a_source(alias: str) -> None:
    own, found = entry(alias)
    hub_id = found.hub_id
    assert (own, entry(hub_id)[0], entry(hub_id)[1].hub_id) == (alias, alias, hub_id)
    assert found.source == f"https://huggingface.co/{hub_id}/blob/main/config.json"


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("Qwen3_32B", "qwen3-32b"),
        ("qwen3-32b", "qwen3-32b"),
        ("QWEN3 32B", "qwen3-32b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("qwen/qwen3_32b", "qwen3-32b"),
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("llama3.1-8b", "llama-3.1-8b"),
        ("llama3_1_8b", "llama-3.1-8b"),
        ("Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("LLM-Research/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("qwen2-5-7b", "qwen2.5-7b"),
        ("deepseekv3", "deepseek-v3"),
        ("phi4", "phi-4"),
        ("GLM4-9B", "glm-4-9b"),
        (" gemma3-27b-it ", "gemma-3-27b"),
    ],
)
def test_spelling_is_forgiven(name: str, alias: str) -> None:
    assert entry(name)[0] == alias


@pytest.mark.parametrize(
    ("name", "alias", "modelscope", "length"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", 32768),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b", "Qwen/Qwen3-8B-Base", None),
        ("Qwen/Qwen3-VL-8B-Thinking", "qwen3-vl-8b", "Qwen/Qwen3-VL-8B-Thinking", None),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", "LLM-Research/Meta-Llama-3.1-8B-Instruct", None),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b", None, 262144),
    ],
)
def test_a_variant_keeps_its_own_ids_and_context_length(
    name: str, alias: str, modelscope: str | None, length: int | None
) -> None:
    own, found = entry(name)
    assert (own, found.hub_id) == (alias, name)
    assert modelscope in (None, found.modelscope_id)
    assert length in (None, found.config.get("max_position_embeddings"))


@pytest.mark.parametrize(
    "name",
    ["", "qwen", "qwen257b", "qwen2-57b", "someone/Qwen3-8B", "./qwen3-8b", "/models/qwen3-8b", "THUDM/glm-4-9b"],
)
def test_another_name_is_not_guessed(name: str) -> None:
    assert aliases.resolve(name) is None


def test_no_two_aliases_are_the_same_checkpoint() -> None:
    repeated = [hub_id for hub_id, n in Counter(entry(alias)[1].hub_id for alias in aliases.known()).items() if n > 1]
    assert repeated == []
