"""`dstrain doctor --network`: measures the network, compares it with its links, keeps it for the next plan."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from dstrain.cli.console import answer, answer_json, say, say_lines, talk
from dstrain.cli.output.doctor import grouped, network_document, printable
from dstrain.config.edits.lock import planned_cluster
from dstrain.doctor.network_measure import Answer, Site, expected, findings, gpu_of, measure
from dstrain.errors import DstrainError
from dstrain.facts import probe
from dstrain.facts.cluster import machines, measured_links
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.this_machine import trains_on_cpu
from dstrain.findings import signs_text
from dstrain.job.file import JobFile


def examine(file: JobFile | None, hostfile: Path | None, *, saves: bool, as_json: bool) -> None:
    """Measures, prints the answer, and keeps the figures if `saves`."""
    site = _site(file, hostfile)
    if site.hosts.num_slots < 2:
        _say_nothing_to_measure(site, as_json=as_json)
        return
    with talk.status("starting a rank on each GPU") as status:
        measurement = measure(site, status.update)
    link = expected(measurement.network, _planned(file))
    network_findings = findings(measurement.network, link)
    kept = _keep(measurement, gpu_of(measurement.network).name) if saves else None
    if as_json:
        answer_json(network_document(measurement, link, network_findings, kept))
    else:
        answer(printable("\n".join(grouped(network_findings, verbose=True))))
    say(signs_text(network_findings))
    if saves:
        _say_kept(kept, site, hostfile)


def _site(file: JobFile | None, hostfile: Path | None) -> Site:
    """Returns where to measure: the hosts of the option or the job, else this machine with its GPUs."""
    job = file.job if file is not None else None
    variables = dict(job.env) if job else {}
    path = hostfile or (Path(job.hostfile) if job and job.hostfile else None)
    on_cpu = trains_on_cpu(os.environ, variables)
    if path is None:
        hosts = machines.local_host(1 if on_cpu else len(probe.local_gpus()))
    else:
        hosts = machines.named(machines.resolve_hosts(path))
    return Site(hosts=hosts, on_cpu=on_cpu, variables=variables)


def _planned(file: JobFile | None) -> Cluster | None:
    """Returns the machines of the plan beside a job, which may say what link is between them."""
    with suppress(DstrainError):
        return planned_cluster(Path(file.job.ds_config).parent) if file is not None else None
    return None


def _say_nothing_to_measure(site: Site, *, as_json: bool) -> None:
    if as_json:
        answer_json({"schema": 1, "network": None, "findings": []})
    what = "one rank" if site.on_cpu else "one GPU" if site.hosts.num_slots else "no GPU"
    say_lines([f"nothing to measure: {what} on {site.hosts.name}; --hostfile FILE names more hosts"])


def _keep(measurement: Answer, gpu: str) -> Path | None:
    """Saves the figures for the next plan and returns the path; None if no plan could use them."""
    today = time.strftime("%Y-%m-%d")
    entry = measured_links.of_network(measurement.network, gpu, date=today, own=socket.gethostname())
    return measured_links.save(entry) if entry is not None else None


def _say_kept(kept: Path | None, site: Site, hostfile: Path | None) -> None:
    """Prints where the figures are and the next command."""
    if kept is None:
        say_lines(["not kept: the hosts have different numbers of slots, and plans are for equal ones"])
        return
    say_lines([f"kept in {kept}: plan and gen-config for these hosts count with it; delete it to forget"])
    where = f" --hostfile {hostfile}" if hostfile else f" --gpus {site.hosts.num_slots}"
    say(f"next: dstrain plan{where} --model MODEL")
