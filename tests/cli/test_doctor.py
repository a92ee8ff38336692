"""`dstrain doctor`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import ROOT, Type
from tests.doctor import machines
from tests.doctor.test_looks import script, smi

Need = Callable[[object, str], None]
HEADINGS = {"software", "DeepSpeed's extensions", "GPUs", "network", "limits, RAM, disk", "hubs and SwanLab"}
ONE = ("--gpus", "1", "--gpu", "h100", "--model", "qwen3-0.6b", "--data", "train.jsonl")
CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def test_this_machine_is_told_in_groups_with_a_count(dstrain: Type, tmp_path: Path) -> None:
    done = dstrain("doctor", "-v", **CPU, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert set(lines) >= HEADINGS
    assert "  ✓ training is on the CPU (DS_ACCELERATOR=cpu); no GPU is needed" in lines
    assert " ✓, " in done.stderr
    assert "next: dstrain gen-config" in done.stderr


def test_what_is_fine_is_only_counted_in_80_columns(dstrain: Type, tmp_path: Path) -> None:
    done = dstrain("doctor", **CPU, TORCH_EXTENSIONS_DIR=str(tmp_path))
    lines = done.stdout.splitlines()
    counts = [re.fullmatch(r"(.+): (\d+) ✓", line) for line in lines if "✓" in line]
    assert all(counts)
    assert {count[1] for count in counts if count} <= HEADINGS
    total = re.search(r"(\d+) ✓", done.stderr)
    assert total is not None
    assert sum(int(count[2]) for count in counts if count) == int(total[1])
    assert [line for line in lines if len(line) > 80 and not line.startswith("    → ")] == [], "but for what is typed"


def test_json_is_alone_on_stdout(dstrain: Type, tmp_path: Path) -> None:
    done = dstrain("doctor", "--json", **CPU, TORCH_EXTENSIONS_DIR=str(tmp_path))
    found = json.loads(done.stdout)
    assert found["schema"] == 1
    (findings,) = found["hosts"].values()
    assert {"mark", "subject", "what", "fix"} <= set(findings[0])
    assert sum(found["counts"].values()) == len(findings)


def test_a_stale_lock_is_an_error_with_the_command_that_removes_it(dstrain: Type, tmp_path: Path) -> None:
    lock = tmp_path / "ext" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (1e9, 1e9))
    done = dstrain("doctor", **CPU, TORCH_EXTENSIONS_DIR=str(tmp_path / "ext"))
    assert done.returncode == 5
    assert f"    → rm {lock}" in done.stdout.splitlines()
    assert "error: 1 problem blocks training" in done.stderr


def test_a_gpu_machine_is_described(dstrain: Type, tmp_path: Path) -> None:
    smi(tmp_path, xml=machines.smi_xml(*[{}] * 8), topo=machines.HGX_H100, p2p=machines.p2p(8, lambda a, b: "OK"))
    done = dstrain("doctor", "-v", PATH=f"{tmp_path}:{os.environ['PATH']}", HF_HUB_OFFLINE="1")
    assert "  ✓ 8 × NVIDIA H100 80GB HBM3, driver 570.158.01 (CUDA up to 12.8)" in done.stdout.splitlines()
    assert "  ✓ attention: sdpa, eager" in done.stdout.splitlines()
    assert "  ✓ the 8 GPUs are connected by NVLink" in done.stdout.splitlines()


def test_a_driver_that_hangs_is_told_in_time(dstrain: Type, tmp_path: Path) -> None:
    for name in ("nvidia-smi", "dmesg", "journalctl", "nvcc"):
        script(tmp_path, name, "exec sleep 600")
    started = time.monotonic()
    done = dstrain("doctor", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert time.monotonic() - started < 8  # 4 s on a machine that has nothing else to do
    assert done.returncode == 5
    assert "✗ no answer from nvidia-smi within" in done.stdout


def test_a_job_is_held_against_ram_and_disk(dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", *ONE)
    done = dstrain("doctor", "-v", **CPU, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert "of checkpoints, " in done.stdout
    assert "✓ RAM: " in done.stdout or "! the job needs" in done.stdout
    assert "next: dstrain run" in done.stderr or done.returncode == 5
    config = tmp_path / "ds_config.json"
    config.write_text(config.read_text().replace('"zero_optimization"', '"zero_optimisation"'))
    done = dstrain("doctor", **CPU, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert "ds_config.json has 1 error → dstrain lint ds_config.json" in done.stdout
    done = dstrain("doctor", "nowhere.yaml")
    assert (done.returncode, "nowhere.yaml: no such file" in done.stderr) == (3, True)


def test_a_placeholder_leaves_this_machine_to_be_looked_at(dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", "--gpus", "16", "--gpu", "h100", "--model", "qwen3-0.6b", "--data", "train.jsonl")
    done = dstrain("doctor", **CPU, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert "CHANGE-ME-1 is a placeholder, not a host, so only this machine is checked" in " ".join(done.stdout.split())
    assert "RAM" not in done.stdout.replace("limits, RAM, disk", "")  # whose it would be is not known yet


def test_a_hostfile_of_this_machine_is_no_network(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    done = dstrain("doctor", "--hostfile", "hostfile", "-v", **CPU, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert "on one host no variable is needed" in " ".join(done.stdout.split())


def test_a_terminal_without_utf_8_gets_plain_signs(dstrain: Type, tmp_path: Path) -> None:
    done = dstrain("doctor", "-v", **CPU, TORCH_EXTENSIONS_DIR=str(tmp_path), PYTHONIOENCODING="ascii")
    assert "  + Python 3." in done.stdout
    assert "?" not in done.stdout


def mounted(need: Need, folder: Path, size: str, at: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the doctor with a small disk mounted in a namespace of its own."""
    need(os.geteuid() == 0 and shutil.which("unshare"), "a small disk needs root and unshare")
    environment = {**os.environ, **CPU, "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(folder)}
    ours = shlex.join([sys.executable, "-m", "dstrain.cli", "doctor", *words])
    line = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size={size} tmpfs {at} && exec {ours}"]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    need("ermission denied" not in done.stderr + done.stdout, "a small disk needs the right to mount")
    return done


def test_dockers_64_mib_of_shared_memory_are_an_error(need: Need, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    done = mounted(need, tmp_path, "64m", "/dev/shm", "--hostfile", "hostfile")
    assert done.returncode == 5, done.stderr
    assert "✗ /dev/shm has 64.0 MiB free of 64.0 MiB, and 2 ranks need 132.0 MiB" in " ".join(done.stdout.split())


def test_a_disk_too_small_for_a_checkpoint_is_an_error(need: Need, dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", *ONE)
    (tmp_path / "output").mkdir()
    done = mounted(need, tmp_path, "1g", str(tmp_path / "output"))
    assert done.returncode == 5, done.stderr
    assert f"GiB, and 1.00 GiB are free in {tmp_path / 'output'} →" in " ".join(done.stdout.split())


def test_few_open_files_are_told(tmp_path: Path) -> None:
    environment = {**os.environ, **CPU, "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    line = ["sh", "-c", f"ulimit -n 200; exec {sys.executable} -m dstrain.cli doctor"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5
    assert "✗ 200 open files are allowed" in done.stdout
