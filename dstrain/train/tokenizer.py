"""Loads the tokenizer of a job, and finds its model on a hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dstrain.choices import Hub
from dstrain.errors import InvalidConfig, not_installed
from dstrain.facts.model.model_files import has_tokenizer
from dstrain.job.schema import Job

OWN_CODE = "The model has its own code; if you trust it: trust_remote_code: true"


def source_of(job: Job) -> str:
    """Returns the argument of `from_pretrained`: a folder, or an id on the Hugging Face hub.

    Raises EnvironmentProblem if the hub is ModelScope and its package is missing.
    """
    if job.hub is not Hub.MODELSCOPE or Path(job.model).is_dir():
        return job.model
    if find_spec("modelscope") is None:
        raise not_installed("hub: modelscope needs", "modelscope", install="pip install 'dstrain[modelscope]'")
    from modelscope import snapshot_download  # type: ignore[import-not-found, unused-ignore]

    return str(snapshot_download(job.model))


def load_tokenizer(job: Job, source: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer with the job's chat template; without a padding token, it pads with eos_token."""
    folder = Path(source)
    if folder.is_dir() and not has_tokenizer(folder):
        # Transformers 5 silently makes an empty tokenizer from config.json alone
        raise InvalidConfig(f"model: {folder} has no tokenizer", hint="Copy the tokenizer files into it.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=job.trust_remote_code)
    except (OSError, ValueError) as error:
        raise cannot_load("tokenizer", job, error) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if job.new_tokens:
        tokenizer.add_tokens(list(job.new_tokens))
    if job.chat_template is not None:
        tokenizer.chat_template = job.chat_template
    return tokenizer


def cannot_load(what: str, job: Job, error: Exception) -> InvalidConfig:
    """Returns the error of a tokenizer or a model that `from_pretrained` cannot load."""
    lines = [line for line in str(error).split("\n") if line.strip()]
    hint = None
    if "trust_remote_code" in str(error):
        hint = OWN_CODE
    elif not Path(job.model).exists():
        hint = "Give a local folder, or an id on a hub that every node can reach."
    return InvalidConfig(
        f'model: the {what} of "{job.model}" cannot be loaded: {lines[0] if lines else error}', hint=hint
    )
