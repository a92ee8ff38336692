"""Chooses the attention kernel of a run from what all of its nodes have, before any rank starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dstrain.choices import Attention
from dstrain.config.lint.rule import JobContext
from dstrain.errors import EnvironmentProblem
from dstrain.facts.attention_kernels import KERNELS, LOADER, OF, AttentionKernels, of_this_machine, repo_version
from dstrain.facts.cluster import machines
from dstrain.facts.model.traits import traits
from dstrain.facts.workload import Workload
from dstrain.job.limits import cpu_limits_of
from dstrain.launch.prepare.job_context import request_of
from dstrain.plan.search.rules import unsuitable

Nodes = Mapping[str, AttentionKernels]
"""Host → its kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The attention that a job asks for."""

    asked: Attention
    place: str
    """Where the job says so, such as `job.yaml:12:3`."""
    planned: Attention
    """The attention of `auto` if a node has nothing better: PyTorch's kernel, or eager."""
    unsuitable: Mapping[Attention, str] = field(default_factory=dict)
    """Versions of FlashAttention that the model or the job cannot have, and why."""
    only_packages: bool = False
    """Whether kernels of the hub do not count: DeepSpeed's sequence parallelism looks for the names of packages."""
    only_hub: bool = False
    """Whether packages do not count, as for families with sinks, which take FlashAttention-3 of the hub."""
    kept: Attention | None = None
    """The attention of the checkpoint to resume from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The attention of all ranks."""

    attn: Attention
    says: str | None
    """The choice and its reason; None if the job names it and every node has it."""
    wish: Wish


def choose(wish: Wish, nodes: Nodes) -> Choice:
    """Returns the attention of all ranks. Raises EnvironmentProblem if nodes lack the one that the job names.

    Kernels count only if all nodes have them from the same source in the same release.
    """
    if wish.asked is not Attention.AUTO:
        return Choice(attn=wish.asked, says=_named(wish, nodes) if wish.asked.is_flash else None, wish=wish)
    suitable = [kernel.attn for kernel in KERNELS if kernel.attn not in wish.unsuitable]
    complete = [attn for attn in suitable if not _lacking(wish, attn, nodes)]
    best = complete[0] if complete else wish.planned
    if wish.kept is not None and wish.kept in (*complete, wish.planned, Attention.EAGER):
        says = f"{_described(wish, wish.kept, nodes)}, as in the checkpoint"
        return Choice(attn=wish.kept, says=says, wish=wish)
    reason = _reason(wish, best, suitable, nodes)
    says = f"{_described(wish, best, nodes)}{f'; {reason}' if reason else ''}"
    return Choice(attn=best, says=says, wish=wish)


def decide(context: JobContext, environment: Mapping[str, str], *, kept: str | None) -> Choice:
    """Returns the attention of a job's ranks; of several nodes the planned one, until they answer.

    Raises EnvironmentProblem if this machine lacks what the job names.
    """
    assert context.job is not None
    assert context.hosts is not None
    wish, is_local = wish_of(context, kept=kept), machines.is_local(context.hosts)
    is_open = wish.asked is Attention.AUTO and len(wish.unsuitable) < len(KERNELS)
    if is_open and not is_local:
        says = f"the best that all nodes have, which they tell at the launch; planned as {wish.planned}"
        return Choice(attn=wish.planned, says=says, wish=wish)
    needs_kernels = is_local and (is_open or wish.asked.is_flash)
    kernels = of_this_machine({**environment, **context.job.job.env}) if needs_kernels else None
    return choose(wish, {"this machine": kernels} if kernels is not None else {})


def wish_of(context: JobContext, *, kept: str | None = None) -> Wish:
    """Returns the attention that a job asks for, whose machines are known; without a known model `auto` is sdpa.

    `kept` is the attention of the checkpoint to resume from.
    """
    assert context.job is not None
    assert context.cluster is not None
    job, model, cluster = context.job.job, context.model, context.cluster
    configuration = request_of(job).of_model(model) if model is not None else None
    wrong: Mapping[Attention, str] = dict.fromkeys(OF, "the model is unknown to the planner")
    if cluster.gpu.is_cpu:
        wrong = {attn: limit.why for attn in OF for limit in cpu_limits_of({"attn": attn})}
    elif model is not None and configuration is not None:
        wrong = unsuitable(Workload(model=model, cluster=cluster), configuration)
    return Wish(
        asked=job.attn,
        place=str(context.job.locate(("attn",))),
        planned=configuration.kernels.attn if configuration is not None else Attention.SDPA,
        unsuitable=wrong,
        only_packages=job.sp > 1,
        only_hub=model is not None and traits(model.model_type).has_sinks,
        kept=Attention(kept) if kept is not None else None,
    )


def _described(wish: Wish, attn: Attention, nodes: Nodes) -> str:
    source = _source(wish, attn, next(iter(nodes.values()))) if nodes else None
    where = f", on all {len(nodes)} nodes" if len(nodes) > 1 and source is not None else ""
    return f"{attn}{f' ({source})' if source is not None else ''}{where}"


def _reason(wish: Wish, best: Attention, suitable: Sequence[Attention], nodes: Nodes) -> str:
    """Returns why it is none of the better ones that a node has or could have."""
    better = suitable[: suitable.index(best)] if best in suitable else suitable
    reasons = []
    if wish.kept is not None:
        reasons.append(f"the checkpoint was trained with {wish.kept}")
        reasons += [_listed(_lacking(wish, wish.kept, nodes))] if wish.kept in suitable else []
    for attn in better:
        lacking = _lacking(wish, attn, nodes)
        if attn is not wish.kept and len(lacking) < len(nodes):
            reasons.append(_listed(lacking))
    if not suitable:
        reasons += dict.fromkeys(wish.unsuitable.values())
    elif best not in suitable and not reasons:
        reasons.append("no FlashAttention is installed that the GPUs run")
    return "; ".join(reasons)


def _named(wish: Wish, nodes: Nodes) -> str | None:
    """Returns which nodes download the kernel that the job names, if one does.

    Raises EnvironmentProblem for those that neither have it nor can download it.
    """
    attn = Attention.FLASH_ATTENTION_3 if wish.only_hub else wish.asked
    lacking = _lacking(wish, attn, nodes)
    without = [host for host in lacking if _source(wish, attn, nodes[host]) is None and not wish.only_packages]
    downloading = [host for host in without if attn in nodes[host].downloadable]
    if missing := {host: why for host, why in lacking.items() if host not in downloading}:
        raise EnvironmentProblem(f"{wish.place}: attn is {wish.asked}, but {_listed(missing)}", hint=_hint(wish, attn))
    repo = OF[attn].repo
    return f"{wish.asked}; {', '.join(downloading)} will download {repo} as the ranks start" if downloading else None


def _hint(wish: Wish, attn: Attention) -> str:
    """Returns the commands that install a kernel."""
    kernel = OF[attn]
    fetch = f"import {LOADER}; {LOADER}.install_kernel('{kernel.repo}', version={repo_version(kernel)})"
    hub = f"pip install 'dstrain[kernels]' and, with a network, python -c \"{fetch}\""
    ways = [*([] if wish.only_hub else [kernel.install]), *([] if wish.only_packages else [hub])]
    return f"There: {', or '.join(ways)}. Or write attn: auto."


def _lacking(wish: Wish, attn: Attention, nodes: Nodes) -> dict[str, str]:
    """Returns the hosts that lack a kernel, or have another release of it than most, and what they lack."""
    sources = {host: _source(wish, attn, kernels) for host, kernels in nodes.items()}
    known = Counter(source for source in sources.values() if source is not None)
    usual = known.most_common(1)[0][0] if known else None
    return {
        host: f"lacks {attn}" if source is None else f"has {source}, most have {usual}"
        for host, source in sources.items()
        if source is None or source != usual
    }


def _listed(lacking: Mapping[str, str]) -> str:
    """Returns hosts and what they lack, those that lack the same together."""
    by_text: dict[str, list[str]] = {}
    for host, text in lacking.items():
        by_text.setdefault(text, []).append(host)
    return "; ".join(f"{', '.join(hosts)} {text}" for text, hosts in by_text.items())


def _source(wish: Wish, attn: Attention, kernels: AttentionKernels) -> str | None:
    return kernels.source(attn, only_packages=wish.only_packages, only_hub=wish.only_hub)
