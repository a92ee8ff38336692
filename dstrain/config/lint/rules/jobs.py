"""Rules about what dstrain's trainer does not support, and about a job's model, data and machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dstrain.choices import Method, Precision
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules.no_effect import has_pass
from dstrain.config.lint.subject import Subject, shown
from dstrain.job.schema import Job

_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def _above_one(path: str) -> Callable[[Subject], bool]:
    return lambda subject: subject.number(path, 0) > 1


def _is_on(path: str) -> Callable[[Subject], bool]:
    return lambda subject: subject.is_true(path)


_NO_WEIGHTS = "each rank holds a part of the model, and the final model has no weights that can be loaded"
_WHOLE_SEQUENCES = "sequences are not cut: every rank trains on whole ones"
_UNREAD = "the Trainer has its own, and nothing reads it"
_NOT_RUN: dict[str, tuple[Callable[[Subject], bool], str]] = {
    "tensor_parallel.autotp_size": (_above_one("tensor_parallel.autotp_size"), _NO_WEIGHTS),
    "tensor_parallel.tp.tp_size": (_above_one("tensor_parallel.tp.tp_size"), _NO_WEIGHTS),
    "sequence_parallel_size": (
        lambda subject: _above_one("sequence_parallel_size")(subject) and has_pass(subject, "autosp"), _WHOLE_SEQUENCES
    ),
    "compile.passes": (
        lambda subject: has_pass(subject, "autosp") or has_pass(subject, "autotp"),
        "the passes run in engine.compile(), which nobody calls",
    ),
    "expert_parallel.enabled": (_is_on("expert_parallel.enabled"), _NO_WEIGHTS),
    "pipeline.stages": (_above_one("pipeline.stages"), "the model is no pipeline of DeepSpeed: it is not split"),
    "hybrid_engine.enabled": (_is_on("hybrid_engine.enabled"), "the engine is one for generation, and not tried here"),
    "data_efficiency.enabled": (_is_on("data_efficiency.enabled"), f"data comes from the Trainer: {_UNREAD}"),
    "autotuning.enabled": (_is_on("autotuning.enabled"), "only DeepSpeed's own launcher tunes"),
}  # fmt: skip
"""What dstrain's trainer does not run or save → whether a configuration asks for it, and what would happen."""


def _not_run(subject: Subject) -> Iterator[Fault]:
    for path, (asks, effect) in _NOT_RUN.items():
        if subject.job is not None and asks(subject):
            yield Fault(
                pointer=tuple(path.split(".")),
                problem=f"{path} is {shown(subject.at(path, None))}, and dstrain run does not do that yet",
                effect=effect,
                fix="remove it",
            )


def _unsaved(subject: Subject) -> Iterator[Fault]:
    """Another program's Trainer splits the model, and saves it only where it may gather."""
    path = "tensor_parallel.autotp_size"
    if subject.job is None and subject.is_trainers and subject.number(path, 0) > 1 and not subject.is_true(_GATHER):
        yield Fault(
            pointer=tuple(path.split(".")),
            problem=f"{path} is {shown(subject.at(path))}, and dstrain run does not do that yet",
            effect="save_model writes no weights: accelerate gathers the parts of tensor parallelism only where "
            "stage3_gather_16bit_weights_on_model_save is true, at any stage",
            fix='remove it, or write "stage3_gather_16bit_weights_on_model_save": true for a Trainer of your own',
        )


def _in_job(subject: Subject, key: str, problem: str, effect: str, fix: str) -> Fault:
    """Returns what to say of a key of the job."""
    assert subject.job is not None
    return Fault(place=subject.job.locate((key,)), problem=problem, effect=effect, fix=fix)


def _steps_of(job: Job) -> Iterator[tuple[str, int, str]]:
    """Yields the keys that say after how many steps something happens, with what never happens where they are large."""
    if job.eval_steps is not None and job.eval_data is not None:
        yield "eval_steps", job.eval_steps, "the model is evaluated at the end only"
    yield "logging_steps", job.logging_steps, "metrics have one line, at the end"


def _never_reached(subject: Subject) -> Iterator[Fault]:
    job = subject.job.job if subject.job is not None else None
    if job is None or job.max_steps is None or subject.job is None:
        return
    for key, steps, effect in _steps_of(job):
        if steps > job.max_steps > 1:
            problem = f"{key} is {steps}, and max_steps is {job.max_steps}"
            yield _in_job(subject, key, problem, effect, f"write a {key} of at most {job.max_steps}")


def _its_own_data(subject: Subject) -> Iterator[Fault]:
    job = subject.job.job if subject.job is not None else None
    if job is not None and job.eval_data is not None and job.eval_data == job.data:
        yield _in_job(subject, "eval_data", "eval_data is the training data",
                      "eval_loss says how well it was learned by heart", "name other data")  # fmt: skip


def _too_long(subject: Subject) -> Iterator[Fault]:
    model, job = subject.model, subject.job.job if subject.job is not None else None
    if model is None or job is None or not 0 < model.max_position_embeddings < job.seq_len:
        return
    problem = f"seq_len is {job.seq_len}, and {model.name} has positions for {model.max_position_embeddings}"
    effect = "what lies beyond was never trained: the loss is wrong there, or an index is out of range"
    yield _in_job(subject, "seq_len", problem, effect, f"write seq_len: {model.max_position_embeddings}")


def _not_on_gpu(subject: Subject) -> Iterator[Fault]:
    """What the GPU does not have; one that was assumed is not asked."""
    job = subject.job.job if subject.job is not None else None
    cluster = subject.cluster
    if job is None or cluster is None or cluster.gpu_origin == "assumed":
        return
    gpu = cluster.gpu
    if job.precision is Precision.BF16 and not gpu.has_bf16 and gpu.name != "cpu":
        yield _in_job(subject, "precision", f"precision is bf16, and {gpu.name} computes no bf16",
                      "products are made in fp32, at a fraction of the speed", "write precision: fp16")  # fmt: skip
    if gpu.name == "cpu" and job.method is Method.QLORA:
        yield _in_job(subject, "method", "method is qlora, and the ranks train on the CPU",
                      "4-bit weights are made for a GPU", "write method: lora")  # fmt: skip


# fmt: off
RULES = (
    Rule(id="DS221", severity=Severity.ERROR, title="what dstrain's trainer does not run or save", find=_not_run,
         source="dstrain/train"),
    Rule(id="DS222", severity=Severity.ERROR, title="tensor parallelism that is not saved", find=_unsaved,
         source="accelerate 1.15 accelerator.py: get_state_dict"),
    Rule(id="DS901", severity=Severity.WARNING, title="steps that the run does not have", find=_never_reached,
         source="dstrain/job/schema.py"),
    Rule(id="DS902", severity=Severity.WARNING, title="an evaluation on the training data", find=_its_own_data,
         source="dstrain/train/arguments.py"),
    Rule(id="DS903", severity=Severity.WARNING, title="samples longer than the model's positions", find=_too_long,
         source="config.json: max_position_embeddings"),
    Rule(id="DS904", severity=Severity.WARNING, title="what the GPU does not have", find=_not_on_gpu,
         source="dstrain/facts/cluster/gpus.py"),
)
"""Rules about the job."""
# fmt: on
