"""Lists the attention kernels of a host, and says which one `dstrain run` takes."""

from __future__ import annotations

from collections.abc import Mapping

from dstrain.doctor.facts import Facts
from dstrain.doctor.finding import Finding, Notes
from dstrain.doctor.requirements import Needs
from dstrain.errors import EnvironmentProblem
from dstrain.facts.attention_kernels import KERNELS, AttentionKernels


def check(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns the kernels of one host; of a run on this host alone the one that it takes, too."""
    notes, kernels = Notes("attention"), facts.attention
    if kernels is None or needs.on_cpu:
        return []
    sources = {kernel.attn: kernels.source(kernel.attn) for kernel in KERNELS}
    names = [f"{attn} ({source})" for attn, source in sources.items() if source is not None]
    notes.ok(f"attention: {', '.join([*names, 'sdpa, eager'])}")
    return notes.findings + (chosen(needs, {"this machine": kernels}) if needs.num_hosts == 1 else [])


def chosen(needs: Needs, by_host: Mapping[str, AttentionKernels]) -> list[Finding]:
    """Returns the attention that `dstrain run` takes on these hosts, or why it refuses the one that the job names."""
    if needs.wish is None or needs.on_cpu or not by_host:
        return []
    from dstrain.launch.prepare.attention import choose  # brings the planner, a quarter of a second

    notes = Notes("attention")
    try:
        choice = choose(needs.wish, by_host)
    except EnvironmentProblem as error:
        notes.bad(error.problem, error.hint)
    else:
        if choice.says is not None:
            notes.ok(f"dstrain run takes {choice.says}")
    return notes.findings
