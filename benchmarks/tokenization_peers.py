"""Tokenizes conversations as TRL and LLaMA-Factory do before they train, in an environment of theirs, for
`benchmarks/tokenization.py`.

`python tokenization_peers.py SIDE FOLDER PROCESSES` runs the tool's own preparation of its training data on
`FOLDER/train.jsonl` with the tokenizer in `FOLDER/model`, loss on answers only, and prints its figures as JSON.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SEQ_LEN = 2048
TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)


def by_trl(folder: Path, tokenizer: Any, processes: int) -> Any:
    """Returns the samples of TRL's SFTTrainer with `assistant_only_loss`."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer.chat_template = TAGGED
    options: dict[str, Any] = {"output_dir": str(folder / "trl"), "max_length": SEQ_LEN, "assistant_only_loss": True}
    arguments = SFTConfig(dataset_num_proc=processes, use_cpu=True, bf16=False, report_to="none", **options)
    rows = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
    # what the method reads of its trainer, whose model plays no part
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=False)
    prepare: Any = SFTTrainer._prepare_dataset
    return prepare(trainer, rows, tokenizer, arguments, False, None, "train")


def by_llamafactory(folder: Path, tokenizer: Any, processes: int) -> Any:
    """Returns the samples of LLaMA-Factory's supervised stage with its template of the same text."""
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args

    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    described: dict[str, Any] = {"file_name": "train.jsonl", "formatting": "sharegpt", "tags": tags}
    described["columns"] = {"messages": "messages"}
    (folder / "dataset_info.json").write_text(json.dumps({"talks": described}))
    settings: dict[str, Any] = {
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "template": "chatml",
        "use_cpu": True,
    }
    settings |= {"dataset": "talks", "dataset_dir": str(folder), "cutoff_len": SEQ_LEN}
    settings |= {
        "report_to": "none",
        "model_name_or_path": str(folder / "model"),
        "output_dir": str(folder / "llamafactory"),
    }
    settings |= {"preprocessing_num_workers": processes, "disable_tqdm": True}
    model, data, training, *_ = get_train_args(settings)
    template = get_template_and_fix_tokenizer(tokenizer, data)
    return get_dataset(template, model, data, training, stage="sft", tokenizer=tokenizer)["train_dataset"]


def counted(make: Callable[[], int]) -> dict[str, Any]:
    """Returns the tokens that a function makes, and the CPU seconds and memory of this process and its children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    cpu_s, begun = -sum(sum(resource.getrusage(kind)[:2]) for kind in kinds), time.monotonic()
    tokens = make()
    cpu_s += sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)
    peak_bytes = max(own_peak_bytes(), 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    figures = {"tokens": tokens, "cpu_s": round(cpu_s, 2), "wall_s": round(time.monotonic() - begun, 2)}
    return {**figures, "tokens_per_cpu_s": round(tokens / cpu_s), "peak_bytes": peak_bytes}


def own_peak_bytes() -> int:
    """Returns the peak memory of this process; that of `getrusage` includes the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def num_tokens(dataset: Any) -> int:
    """Returns the tokens of a data set."""
    import pyarrow.compute

    return int(pyarrow.compute.sum(pyarrow.compute.list_value_length(dataset.data.column("input_ids"))).as_py())


SIDES = {"trl": by_trl, "llamafactory": by_llamafactory}


def main(side: str, folder: Path, processes: int) -> None:
    importlib.import_module({"trl": "trl.trainer.sft_trainer", "llamafactory": "llamafactory.data"}[side])
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    datasets: list[Any] = []

    def make() -> int:
        datasets.append(SIDES[side](folder, tokenizer, processes))
        return num_tokens(datasets[0])

    figures = counted(make)
    counts = {"learned": sum(label != -100 for label in datasets[0][0]["labels"]), "samples": len(datasets[0])}
    print(json.dumps({"side": side, **figures, "first": counts}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
