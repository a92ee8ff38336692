"""Measures the steps of any tool that trains with Transformers' Trainer: Python imports this file in every rank.

`benchmarks/peers.py` and `benchmarks/overhead.py` put its folder on PYTHONPATH. The same lines run in each tool, with
its own release of Transformers. Steps are measured in rounds, and before each a rank waits for its tool's turn. After
the last step the model is evaluated on the same samples, whatever the tool reports as its loss.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SETTINGS = "DSTRAIN_PEERS"
"""Environment variable: JSON with `folder`, `warmup`, `steps`, `rounds`, `pad`, `held_out`, `parent`, `connects` and
`monitoring`: of dstrain's, `timed` counts the CPU seconds, `on` leaves it as it is, `off` removes it. `nice` is that of
the rank's threads in its rounds, 0 without it; experts are counted in `counting_rounds`, without it in all."""
_POLL_S = 0.2
_BATCH = 16
_IGNORED = -100


class Probe:
    """What one rank measures in each round."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._folder = Path(settings["folder"])
        self._counted = {"tokens": 0, "positions": 0, "targets": 0, "monitor_cpu_s": 0.0, "experts_cpu_s": 0.0}
        self._engine: Any = None
        self.counts_experts = True
        """Whether the round counts the tokens of experts."""
        self._began: dict[str, float] = {}
        self._loss = float("nan")

    def count(self, engine: Any, inputs: dict[str, Any]) -> None:
        """Counts a micro-batch."""
        self._engine = engine
        ids = inputs["input_ids"]
        self._counted["positions"] += ids.numel()
        self._counted["tokens"] += int((ids != self._settings["pad"]).sum())
        self._counted["targets"] += int((inputs["labels"] != _IGNORED).sum())

    def add_monitoring(self, seconds: float) -> None:
        """Adds CPU seconds that dstrain's monitoring took."""
        self._counted["monitor_cpu_s"] += seconds

    def add_experts(self, seconds: float) -> None:
        """Adds CPU seconds that counting experts took."""
        self._counted["experts_cpu_s"] += seconds

    def log(self, logs: dict[str, Any]) -> None:
        """Keeps the loss that the tool logs."""
        if "loss" in logs:
            self._loss = float(logs["loss"])

    def step(self, step: int) -> None:
        """Ends a round at its last step, and begins the next one once it is this tool's turn."""
        number, rest = divmod(step - self._settings["warmup"], self._settings["steps"])
        if number < 0 or rest:
            return
        if number > 0:
            _schedule(0)
            found = {name: value - self._began[name] for name, value in self._clocks().items()}
            if number == self._settings["rounds"]:
                rows = json.loads(Path(self._settings["held_out"]).read_text(encoding="utf-8"))
                found |= {"held_out_loss": _held_out_loss(self._engine, rows), "last_loss": self._loss}
            self._write(number - 1, found)
        if number < self._settings["rounds"]:
            while not (self._folder / f"go{number}").exists():
                if not self._folder.exists():
                    sys.exit("the benchmark has ended")
                time.sleep(_POLL_S)
            self.counts_experts = number in self._settings.get("counting_rounds", (number,))
            _schedule(self._settings.get("nice", 0))
            self._began = self._clocks()

    def _clocks(self) -> dict[str, float]:
        """Returns the CPU seconds of all threads of this rank, and what has been counted."""
        clocks = {"cpu_s": time.process_time(), "wall_s": time.perf_counter(), "launcher_cpu_s": self._launchers_s()}
        return clocks | self._counted

    def _write(self, number: int, found: dict[str, float]) -> None:
        path = self._folder / f"round{number}-rank{os.environ['RANK']}.json"
        path.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
        path.with_suffix(".part").replace(path)

    def _launchers_s(self) -> float:
        """Returns the CPU seconds of the processes between the benchmark and this rank. Source: proc(5), stat."""
        ticks, process = 0, os.getppid()
        while process not in (0, 1, self._settings["parent"]):
            fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            process = int(fields[1])
        return ticks / os.sysconf("SC_CLK_TCK")


def _schedule(nice: int) -> None:
    """Gives this rank's threads, and the session they share the cores as, a nice value, if it may.

    Source: sched(7), the autogroup feature.
    """
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice), encoding="utf-8")
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)


def _held_out_loss(engine: Any, rows: Sequence[dict[str, list[int]]]) -> float:
    """Returns the mean loss per target of samples in tokens; all ranks evaluate the same ones, as ZeRO-3 needs."""
    import torch

    total, targets = 0.0, 0
    engine.eval()
    with torch.no_grad():
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            width = max(len(row["input_ids"]) for row in part)
            ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in part])
            labels = torch.tensor([row["labels"] + [_IGNORED] * (width - len(row["labels"])) for row in part])
            positions = torch.arange(width).expand(len(part), width)  # padding follows what has loss
            logits = engine(input_ids=ids, position_ids=positions, use_cache=False).logits
            losses = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=_IGNORED, reduction="sum"
            )
            total, targets = total + float(losses), targets + int((labels[:, 1:] != _IGNORED).sum())
    engine.train()
    return total / targets


def _before(kind: Any, name: str, action: Callable[..., None]) -> None:
    """Calls `action` with the arguments of a method before the method."""
    method = getattr(kind, name)

    def called(*arguments: Any, **options: Any) -> Any:
        action(*arguments, **options)
        return method(*arguments, **options)

    setattr(kind, name, called)


def _after(kind: Any, name: str, action: Callable[..., None]) -> None:
    """Calls `action` with the arguments of a method after the method."""
    method = getattr(kind, name)

    def called(*arguments: Any, **options: Any) -> Any:
        result = method(*arguments, **options)
        action(*arguments, **options)
        return result

    setattr(kind, name, called)


def _watch(trainer: Any, probe: Probe, *, connects: bool) -> None:
    """Puts the probe into `transformers.trainer`, and connects the ranks of a tool that does not do so by itself.

    With `use_cpu` Transformers does not tell DeepSpeed of the ranks before ZeRO-3 loads the model.
    """
    if connects:
        import deepspeed  # type: ignore[import-untyped]

        deepspeed.init_distributed(dist_backend="gloo")
    handler = trainer.CallbackHandler
    _before(trainer.Trainer, "training_step", lambda self, model, inputs, *_, **__: probe.count(model, inputs))
    _before(handler, "on_log", lambda self, args, state, control, logs, *_, **__: probe.log(logs))
    _after(handler, "on_step_end", lambda self, args, state, control, *_, **__: probe.step(state.global_step))


def _timed(kind: Any, names: Sequence[str], add: Callable[[float], None]) -> None:
    """Adds the CPU seconds of calls of methods or functions, and of the contexts that they return."""

    def timed(function: Any, *arguments: Any, **options: Any) -> Any:
        before = time.thread_time()
        result = function(*arguments, **options)
        add(time.thread_time() - before)
        return result

    @contextmanager
    def around(context: Any) -> Iterator[Any]:
        entered = timed(context.__enter__)
        yield entered
        timed(context.__exit__, None, None, None)  # an error ends the run

    def wrapped(function: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            result = timed(function, *arguments, **options)
            return around(result) if hasattr(result, "__enter__") else result

        return called

    for name in names:
        setattr(kind, name, wrapped(getattr(kind, name)))


def _time_meter(meter: Any, probe: Probe) -> None:
    _timed(meter.Meter, ("count", "forward", "begin_step", "end_step"), probe.add_monitoring)
    _timed(meter, ("_counts",), probe.add_monitoring)


def _time_collectives(collectives: Any, probe: Probe) -> None:
    _timed(collectives.Collectives, ("close", "_note", "_stood"), probe.add_monitoring)
    _timed(collectives, ("_described",), probe.add_monitoring)


def _time_callback(callback: Any, probe: Probe) -> None:
    _timed(callback.MetricsCallback, ("on_step_begin", "on_step_end", "on_log", "drain"), probe.add_monitoring)


def _alternate_experts(loads: Any, probe: Probe) -> None:
    """Counts experts in some of the rounds, and measures it."""
    _timed(loads.ExpertLoads, ("_count", "close", "record"), probe.add_experts)
    count = loads.ExpertLoads._count

    def alternately(*arguments: Any) -> None:
        if probe.counts_experts:
            count(*arguments)

    loads.ExpertLoads._count = alternately


def _remove_meter(meter: Any) -> None:
    for name in ("count", "begin_step", "end_step", "pause", "restart"):
        setattr(meter.Meter, name, lambda *_, **__: None)
    meter.Meter.forward = meter.Meter.aside = lambda *_, **__: nullcontext()
    meter.Meter.timed = lambda _, batches: batches
    meter._counts = lambda _: meter.Counts()


def _remove_callback(callback: Any) -> None:
    for name in ("on_train_begin", "on_optimizer_step", "on_step_begin", "on_step_end", "on_log", "saved"):
        setattr(callback.MetricsCallback, name, lambda *_, **__: None)
    callback.MetricsCallback.drain = lambda _: {}


class _Finder(MetaPathFinder):
    """Calls an action after a module was imported."""

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self._actions = actions

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        action = self._actions.pop(fullname, None)
        if action is None:
            return None
        spec = find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _Then(spec.loader, action)
        return spec


class _Then(Loader):
    def __init__(self, loader: Any, action: Callable[[Any], None]) -> None:
        self._loader = loader
        self._action = action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        self._action(module)


def _install(settings: dict[str, Any]) -> None:
    probe = Probe(settings)
    monitoring: dict[str, dict[str, Callable[[Any], None]]] = {
        "timed": {
            "dstrain.monitor.meter": lambda module: _time_meter(module, probe),
            "dstrain.monitor.callback": lambda module: _time_callback(module, probe),
            "dstrain.monitor.collectives": lambda module: _time_collectives(module, probe),
        },
        "on": {},
        "off": {"dstrain.monitor.meter": _remove_meter, "dstrain.monitor.callback": _remove_callback},
    }
    actions: dict[str, Callable[[Any], None]] = {
        "transformers.trainer": lambda module: _watch(module, probe, connects=settings["connects"]),
        "dstrain.monitor.meter": lambda module: _alternate_experts(module, probe),
        **monitoring[settings["monitoring"]],
    }
    sys.meta_path.insert(0, _Finder(actions))


if SETTINGS in os.environ and "RANK" in os.environ:
    _install(json.loads(os.environ[SETTINGS]))
