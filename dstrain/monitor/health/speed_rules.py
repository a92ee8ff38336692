"""Rules about speed: data, ranks, links, checkpoints and GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dstrain.job.monitor import HealthRule
from dstrain.monitor.health import outlook, speed_signals
from dstrain.monitor.health.rule import Rule

SPEED_RULES: Mapping[HealthRule, Rule] = MappingProxyType(
    {
        HealthRule.SLOWDOWN: Rule(
            signal=speed_signals.slowdown,
            warn=1.15,
            critical=1.5,
            normal=1.0,
            problem="steps take {value:.2f} times as long as before",
            advice="dstrain doctor compares the nodes: another process, a throttled GPU, a slow link or disk.",
            source="Greyhound (USENIX ATC 2025): slow machines and links cost 1.34 times the time on average",
        ),
        HealthRule.DATA_WAIT: Rule(
            signal=speed_signals.data_wait,
            warn=0.05,
            critical=0.20,
            problem="ranks wait for data {value:.0%} of the time",
            advice="Raise dataloader_num_workers.",
            source="5 % is what a faster loader could gain at most",
        ),
        HealthRule.PADDING: Rule(
            signal=speed_signals.padding,
            warn=0.20,
            critical=0.50,
            outlook=outlook.packing_gain,
            problem="{value:.0%} of all tokens are padding",
            advice="packing: true puts several samples into a row.",
            source="trl#3526: packing is up to 3.7 times as fast",
        ),
        HealthRule.SLOW_RANK: Rule(
            signal=speed_signals.slow_rank,
            warn=0.18,
            critical=0.33,
            rank=speed_signals.slowest_rank,
            problem="rank {rank} works {value:.0%} longer than the fastest rank, communication not counted",
            advice="All ranks wait for it: dstrain doctor compares the nodes (clocks, other processes, CPU).",
            source="NVIDIA's NVRx: a rank at 0.75 of the fastest one's speed is a straggler; a warning from 0.85",
        ),
        HealthRule.SLOW_LINKS: Rule(
            signal=speed_signals.slow_links,
            warn=1.3,
            critical=2.0,
            normal=1.0,
            problem="steps take {value:.2f} times as long, but neither forward passes nor data: communication does",
            advice="dstrain doctor --network measures the links.",
            source="Greyhound: slow phases cost 1.34 times the time on average, and 40 % of them are the network's",
        ),
        HealthRule.BUS_BANDWIDTH: Rule(
            signal=speed_signals.bus_bandwidth,
            warn=0.6,
            critical=0.3,
            is_low=True,
            normal=1.0,
            problem="large collectives reach {value:.0%} of the bandwidth that the plan expects of the links",
            advice="dstrain doctor --network measures the links; NCCL_DEBUG=INFO names the transport in the log.",
            source="swanlab#1825 and LLaMA-Factory#5014: NCCL over sockets where InfiniBand is",
        ),
        HealthRule.EXPOSED_COMMUNICATION: Rule(
            signal=speed_signals.exposed_communication,
            warn=0.1,
            critical=0.5,
            problem="ranks wait for collectives in {value:.0%} more of a step than planned",
            advice="The verdict after the first steps names bytes and bandwidth: dstrain report shows them too.",
            source="ten points are the plan's own error of a step; the 10 % of guides cannot hold over Ethernet",
        ),
        HealthRule.CPU_WAIT: Rule(
            signal=speed_signals.cpu_wait,
            warn=0.05,
            critical=0.2,
            rank=speed_signals.rank_without_cpu,
            problem="rank {rank} was ready to run, but had no CPU, in {value:.0%} of its forward passes' time",
            advice="Other processes use its cores: fewer data workers, or cores of its own for each rank.",
            source="as data_wait; the kernel counts it (schedstat)",
        ),
        HealthRule.LOW_MFU: Rule(
            signal=speed_signals.low_mfu,
            warn=0.6,
            critical=0.3,
            is_low=True,
            normal=1.0,
            problem="MFU is {value:.0%} of the plan's",
            advice="The verdict after the first steps and dstrain report say which part takes longer.",
            source="the plan's own range is 23 %; less than 0.6 is outside of it twice",
        ),
        HealthRule.CHECKPOINT_TIME: Rule(
            signal=speed_signals.checkpoint_time,
            warn=0.05,
            critical=0.20,
            problem="the newest checkpoint took {value:.0%} of the time since the one before",
            advice="Raise save_steps, or write to a faster disk; save_only_model omits the optimizer.",
            source="NVIDIA NeMo-RL#1283: more than 5 % of the interval",
        ),
        HealthRule.SLOW_CHECKPOINT: Rule(
            signal=speed_signals.slow_checkpoint,
            warn=2,
            critical=5,
            normal=1.0,
            problem="the newest checkpoint took {value:.1f} times as long as those before",
            advice="The disk of output_dir is slower than before: is it full, or do others write to it?",
            source="as slowdown, with room for the noise of a shared disk",
        ),
        HealthRule.GPU_CLOCK: Rule(
            signal=speed_signals.gpu_clock,
            warn=0.9,
            critical=0.7,
            is_low=True,
            normal=1.0,
            rank=speed_signals.slowest_clock,
            problem="the clock of rank {rank}'s GPU is {value:.0%} of the others'",
            advice="nvidia-smi -q -d PERFORMANCE names the reason: heat, power, or a limit that somebody set.",
            source="LLaMA-Factory#3520: unequal GPUs",
        ),
        HealthRule.GPU_POWER: Rule(
            signal=speed_signals.gpu_power,
            warn=0.7,
            is_low=True,
            normal=1.0,
            rank=speed_signals.least_power,
            problem="rank {rank}'s GPU draws {value:.0%} of the others' power",
            advice="It computes less than they do, or waits: dstrain doctor compares clocks and links.",
            source="LLaMA-Factory#3520; GPUs that do the same draw the same within some percent",
        ),
        HealthRule.BUSY_AT_LOW_POWER: Rule(
            signal=speed_signals.busy_at_low_power,
            warn=0.5,
            is_low=True,
            normal=1.0,
            problem="GPUs report to be busy and draw {value:.0%} of their power limit",
            advice="They wait in collectives or start tiny kernels: a larger micro_batch, packing, or faster links.",
            source="LLaMA-Factory#3520: 100 % busy at low power",
        ),
    }
)
