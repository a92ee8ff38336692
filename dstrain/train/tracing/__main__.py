"""The meta-tensor tracer: answers questions about models with the live bytes of a training pass.

    echo '{"questions": [{"subject": {"config": {…}}, "seq_len": 4096}]}' | python -m dstrain.train.tracing

reads `Questions` of `facts.model.tracer` as JSON and writes `Answers`, in the same order. It needs neither weights nor
a GPU: Transformers' own code runs forward, loss and backward on meta tensors, with CUDA's choice of kernels, and every
storage is counted while it is alive. Allocations inside kernels are invisible: cuBLAS and attention workspaces, the
sorting in embedding gradients.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from dataclasses import replace
from typing import Any

from dstrain.choices import LOGITS_PER_TILE, LossKernel
from dstrain.errors import DstrainError
from dstrain.facts.model.tracer import Answer, Answers, Failure, Questions
from dstrain.facts.model.traces import BATCHES, ActivationProfile, Question, Trace, Wanted, depths, fit
from dstrain.garbage import collect_seldom
from dstrain.records import from_data, to_data


def answer(question: Question) -> Answer:
    """Returns the answer to one question; errors are answers too."""
    from dstrain.train.tracing.building import describe
    from dstrain.train.tracing.passes import trace

    try:
        match question.wanted:
            case Wanted.DESCRIPTION:
                return describe(question.subject)
            case Wanted.TRACE:
                return trace(question)
            case Wanted.PROFILE:
                return profile(question)
    except DstrainError as error:
        traceback.print_exc()
        return Failure(problem=error.problem, hint=error.hint)


def profile(question: Question) -> ActivationProfile:
    """Returns the profile of a way to train: one or two depths, two micro-batches, with and without checkpointing.

    With the chunked loss where a sample does not fill a tile of the fused one, whose bytes then grow by steps.
    """
    from dstrain.train.tracing.building import describe
    from dstrain.train.tracing.passes import trace

    description = describe(question.subject)
    if question.loss is LossKernel.FUSED and question.seq_len * description.sizes["vocab_size"] < LOGITS_PER_TILE:
        question = replace(question, loss=LossKernel.CHUNKED)
    depth = depths(description.layer_kinds)
    corners = [(layers, samples) for layers in sorted({depth.few, depth.more}) for samples in BATCHES]

    def traced(layers: int, samples: int, grad_ckpt: bool) -> Trace:
        fields = {"num_hidden_layers": layers, "micro_batch": samples, "grad_ckpt": grad_ckpt, "every_moment": True}
        return trace(replace(question, wanted=Wanted.TRACE, **fields))  # type: ignore[arg-type]

    kept, recomputed = ({at: traced(*at, grad_ckpt) for at in corners} for grad_ckpt in (False, True))
    return fit(depth, kept=kept, recomputed=recomputed)


def main() -> None:
    """Answers the questions on standard input; output of libraries goes to standard error."""
    collect_seldom()
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"  # these checks read the data of tensors
    out, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    data: Any = json.load(sys.stdin)
    batch = from_data(Questions, data, locate=lambda place: "/".join(map(str, place)))
    answers = Answers(answers=tuple(answer(question) for question in batch.questions))
    json.dump(to_data(answers), out)
    out.flush()  # Python flushes sys.stdout at its end, which is another stream now


if __name__ == "__main__":
    main()
