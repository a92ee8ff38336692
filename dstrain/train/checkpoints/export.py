"""Makes a folder that `from_pretrained` loads: `python -m dstrain.train.checkpoints.export CHECKPOINT_OR_RUN_DIR OUT`.

Adapters are merged into their base; DeepSpeed's own functions gather the shards of ZeRO checkpoints. It is one process
without a GPU, and needs RAM for the fp32 weights and for those in the requested dtype.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from dstrain.choices import Precision
from dstrain.config.resolve_auto import GATHERS
from dstrain.errors import Conflict, DstrainError, EnvironmentProblem, InvalidConfig, RunFailed
from dstrain.facts.model.model_files import ADAPTER, PROCESSOR_FILES, read
from dstrain.rundir import RunDir, read_record
from dstrain.train import adapters
from dstrain.train.adapters import untie
from dstrain.train.checkpoints.checkpoints import content_damage, recorded, refuse_altered, refuse_damaged
from dstrain.train.checkpoints.saved_model import DTYPES, converted, family_of, require_whole_model
from dstrain.train.checkpoints.tensor_files import load_only_tensors, naming_pickles, nonfinite_weights, reading_back
from dstrain.train.rank import quieten

_UNTIED = "the exported model has a head of its own, because the adapter changes the embedding or the head alone"


def export(source: Path, out: Path, *, precision: Precision | None = None) -> Path:
    """Writes model, config and tokenizer of `source` to `out`, and returns the folder that was read.

    `precision` is by default the base model's. Raises InvalidConfig for an incomplete checkpoint or another kind
    of folder, and Conflict if `out` is not empty.
    """
    _refuse_full(out)
    folder = locate(source)
    if (folder / "adapter_config.json").is_file():
        model = _merged(folder, precision)
    elif any(folder.glob("global_step*")):
        model = (_saved if _is_shared_out(folder) else _gathered)(folder, precision)
    else:
        model = _loaded(folder, precision)
    # written beside it and renamed, so that a folder with the name is whole
    part = out.with_name(f".{out.name}.part")
    if names := nonfinite_weights(model):
        problem = f"{folder} holds values that are not finite (NaN or infinite): {', '.join(names[:5])}"
        raise RunFailed(problem, hint="Export an earlier checkpoint.")
    try:
        with reading_back():
            model.save_pretrained(part)
        _save_tokenizer(folder, part)
        require_whole_model(part)
        if out.exists():
            out.rmdir()
        part.rename(out)
    except OSError as error:
        raise EnvironmentProblem(f"{out}: cannot be written: {error}", hint="Use another folder.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _refuse_full(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Conflict(f"{out} is not an empty folder", hint="Use a new folder.")


def locate(source: Path) -> Path:
    """Returns the folder to read: a checkpoint, a final model, or of a run directory the best checkpoint
    (`load_best`), else the newest complete one.
    """
    run_dir = RunDir(source)
    if not source.is_dir():
        raise InvalidConfig(f"{source}: no such folder")
    if not run_dir.request.exists():
        # it was named, so it is refused if it is broken; of a run directory another one is taken
        if any(source.glob("global_step*")) or source.name.startswith("checkpoint-"):
            refuse_damaged(source)
            refuse_altered(source)
        elif not (source / "config.json").exists() and not (source / "adapter_config.json").exists():
            raise InvalidConfig(f"{source} is neither a checkpoint nor a run directory")
        return source
    for problem in run_dir.newest_checkpoint().skipped:
        print(f"warning: skipped {problem}", file=sys.stderr)
    whole = [run_dir.best_checkpoint(), *(folder for _, folder in reversed(run_dir.whole_checkpoints()))]
    for checkpoint in dict.fromkeys(folder for folder in whole if folder is not None):
        altered = content_damage(checkpoint, recorded(checkpoint))
        if altered is None:
            return checkpoint
        print(f"warning: skipped {checkpoint.name} {altered}", file=sys.stderr)
    if run_dir.summary.exists() and run_dir.final.exists():
        return run_dir.final
    raise InvalidConfig(f"{source} has no complete checkpoint", hint="Let the run reach save_steps.")


def _config(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder)


def _merged(folder: Path, precision: Precision | None) -> Any:
    """Returns the base model with the adapter merged into its weights."""
    from peft import PeftModel

    adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    base = adapter["base_model_name_or_path"]
    config = _config(base)
    adapters.stretch(config, adapters.read_beside_adapter(folder))
    model = family_of(config).from_pretrained(base, config=config, dtype=DTYPES[precision] if precision else "auto")
    rows = [tensor.shape[0] for name, tensor in read(folder, ADAPTER).items() if name.endswith("embed_tokens.weight")]
    if rows and rows[0] != model.config.get_text_config().vocab_size:  # with new tokens
        model.resize_token_embeddings(rows[0], mean_resizing=False)
    adapted = PeftModel.from_pretrained(model, str(folder))
    if untie(adapted):
        print(f"{_UNTIED}: {base} has one weight for both", file=sys.stderr)
    return adapted.merge_and_unload()


def _gathered(folder: Path, precision: Precision | None) -> Any:
    """Returns the model with the gathered fp32 weights of all shards, in the requested dtype."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # type: ignore[import-untyped]

    config = _config(folder)
    dtype = DTYPES[precision] if precision else getattr(config, "dtype", None) or torch.float32
    try:
        state = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    except (ValueError, FileNotFoundError, KeyError) as error:  # such as shards of tensor or sequence parallelism
        raise InvalidConfig(
            f"{folder}: DeepSpeed cannot gather its shards: {str(error).partition(chr(10))[0]}"
        ) from error
    with torch.device("meta"):
        model = family_of(config).from_config(config, dtype=dtype)
    state = converted(state, model, torch.float32, dtype)
    if read_record(folder)["zero_stage"] == 1 and model.state_dict().keys() - state.keys():
        state = {**_saved(folder, precision).state_dict(), **state}  # DeepSpeed writes frozen weights from ZeRO-2 on
    _, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    unfilled = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unfilled or unexpected:
        raise InvalidConfig(
            f"{folder}: the shards do not match the model in its config.json: "
            f"{len(unfilled)} tensors are missing, {len(unexpected)} are unknown ({(unfilled + unexpected)[0]} …)"
        )
    return model


def _is_shared_out(folder: Path) -> bool:
    """Returns whether DeepSpeed cannot gather the shards of a checkpoint, as with tensor- or expert-parallel ranks.

    Without ZeRO there are none. With sequence parallelism under ZeRO-1 and 2, files are named as if they were. The
    weights that were saved with the checkpoint, in the dtype of the base model, are whole.
    Source: deepspeed 0.19.8 utils/zero_to_fp32.py.
    """
    record = read_record(folder)
    is_divided = record.get("tp", 1) > 1 or record.get("ep", 1) > 1
    return bool(is_divided or not record["zero_stage"] or (record.get("sp", 1) > 1 and record["zero_stage"] < 3))


def _saved(folder: Path, precision: Precision | None) -> Any:
    """Returns the model that was saved with a checkpoint. Raises InvalidConfig if its weights were not gathered."""
    if not any(folder.glob("model*.safetensors")):
        problem = f"{folder} has only the parts of its weights that its ranks held"
        raise InvalidConfig(problem, hint=f'Resume from it with "{GATHERS}": true, and export the final model.')
    return _loaded(folder, precision)


def _loaded(folder: Path, precision: Precision | None) -> Any:
    config = _config(folder)
    return family_of(config).from_pretrained(folder, dtype=DTYPES[precision] if precision else "auto")


def _save_tokenizer(folder: Path, out: Path) -> None:
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m dstrain.train.checkpoints.export", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("source", type=Path, metavar="CHECKPOINT_OR_RUN_DIR")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--dtype", choices=[str(p) for p in Precision], help="default: that of the base model")
    parser.add_argument("--dry-run", action="store_true", help="print what would be read, and write nothing")
    given = parser.parse_args(arguments)
    quieten(on_terminal=sys.stderr.isatty())
    try:
        _refuse_full(given.out)
        if given.dry_run:
            folder = locate(given.source)
        else:
            load_only_tensors()
            with naming_pickles(given.source):
                folder = export(given.source, given.out, precision=Precision(given.dtype) if given.dtype else None)
    except DstrainError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{folder} {'would be exported' if given.dry_run else 'exported'} to {given.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
