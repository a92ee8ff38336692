"""What an exported folder computes, in one process; other tests export what ranks trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from dstrain.job.model_changes import Lora
from dstrain.train.adapters import load, with_adapter
from dstrain.train.checkpoints.export import export
from tests.train.engine_cases import TIED

# of PEFT, whose pages say how merging fails; and a name that will change
pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_a_merged_adapter_of_a_tied_embedding_or_head_computes_what_was_trained(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, lora = tmp_path / "base", Lora(rank=2, targets=("q_proj", target))
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TIED, **sizes}))
    plain.save_pretrained(base)
    model = with_adapter(AutoModelForCausalLM.from_pretrained(base), lora, grad_ckpt=False, dtype=None).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(
        tmp_path / "adapter"
    )
    again = with_adapter(AutoModelForCausalLM.from_pretrained(base), lora, grad_ckpt=False, dtype=None).eval()
    load(again, tmp_path / "adapter", lora)
    export(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(64)[None]
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)
    torch.testing.assert_close(merged(input_ids=ids).logits, model(input_ids=ids).logits)
    assert "has a head of its own" in capsys.readouterr().err
