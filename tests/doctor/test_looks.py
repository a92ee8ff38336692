"""What is looked at: this machine, and stand-ins for what it does not have."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dstrain.doctor import gpu_probes as probe
from dstrain.doctor import probes
from dstrain.doctor.facts import Facts, Question
from dstrain.doctor.gather import LOOKS, gather
from dstrain.doctor.probes import all_at_once, run
from dstrain.records import from_data, to_data
from tests.doctor import machines

ASKED = Question()


def test_a_look_that_hangs_is_left_behind() -> None:
    started = time.monotonic()
    seen = all_at_once({"slow": lambda: time.sleep(30), "good": lambda: 7, "bad": lambda: 1 / 0}, 0.3)
    assert time.monotonic() - started < 3
    assert seen["good"].value == 7
    assert seen["slow"].problem == "no answer within 0.3 s"
    assert seen["bad"].problem == "ZeroDivisionError: division by zero"


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    said = run(["sh", "-c", f"sleep 60 & echo $! > {mark}; wait"], {"PATH": "/usr/bin:/bin"}, 0.5)
    assert said.is_late
    child = Path(f"/proc/{mark.read_text().strip()}/stat")
    for _ in range(50):
        try:
            if child.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.05)
    raise AssertionError("the child goes on")


def test_a_command_says_last_why_it_failed() -> None:
    said = run(["sh", "-c", "echo one; echo two >&2; exit 3"], {"PATH": "/usr/bin:/bin"}, 5)
    assert (said.code, said.last_line) == (3, "two")


def script(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def smi(folder: Path, **answers: str) -> dict[str, str]:
    """Returns the environment of a machine whose nvidia-smi gives these answers."""
    for name, text in answers.items():
        (folder / name).write_text(text)
    cases = f'"-q -x") cat {folder}/xml;; "topo -m") cat {folder}/topo;; "topo -p2p r") cat {folder}/p2p;;'
    script(folder, "nvidia-smi", f'case "$*" in {cases} esac')
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_nvidia_smi_is_asked_for_state_and_topology(tmp_path: Path) -> None:
    there = smi(
        tmp_path,
        xml=machines.smi_xml({}, {}),
        topo=machines.TWO_5090,
        p2p=machines.TWO_5090_P2P,
    )
    found, joined = probe.look(ASKED, there), probe.look_topology(ASKED, there)
    assert [gpu.bus for gpu in found.gpus] == ["0000:10:00", "0000:11:00"]
    assert joined is not None
    assert joined.p2p == (("X", "GNS"), ("GNS", "X"))


def test_what_nvidia_smi_complains_of_is_kept(tmp_path: Path) -> None:
    script(tmp_path, "nvidia-smi", 'echo "NVIDIA-SMI has failed because it couldn\'t communicate"; exit 9')
    found = probe.look(ASKED, {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (found.has_driver, found.problem) == (True, "NVIDIA-SMI has failed because it couldn't communicate")


def test_the_kernels_log_is_read_where_it_may_be(tmp_path: Path) -> None:
    script(tmp_path, "dmesg", "echo '[ 1.5] NVRM: Xid (PCI:0000:10:00): 79, GPU has fallen off the bus.'")
    found = probe.look_kernel_log(ASKED, {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert [(xid.code, xid.bus) for xid in found.xids] == [(79, "0000:10:00")]


def test_a_log_that_may_not_be_read_is_looked_for_in_the_journal(tmp_path: Path) -> None:
    script(tmp_path, "dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    line = "[    1.500000] node0 kernel: NVRM: Xid (PCI:0000:10:00): 48, pid=1, DBE"
    script(tmp_path, "journalctl", f"echo '{line}'")
    there = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert [xid.code for xid in probe.look_kernel_log(ASKED, there).xids] == [48]
    script(tmp_path, "journalctl", "echo '-- No entries --'")
    assert probe.look_kernel_log(ASKED, there).problem == "journalctl: -- No entries --"


def test_rdma_ports_are_read_in_their_order(tmp_path: Path) -> None:
    for name, state in (("mlx5_10", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "link_layer").write_text("Ethernet\n")
        (tmp_path / name / "device" / "net" / f"eth_{name}").mkdir(parents=True)
    found = probes.rdma_ports(tmp_path)
    assert [(each.device, each.state, each.gbits_per_s, each.interface) for each in found] == [
        ("mlx5_2", "ACTIVE", 400.0, "eth_mlx5_2"),
        ("mlx5_10", "DOWN", 400.0, "eth_mlx5_10"),
    ]


def test_who_holds_the_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        found = probes.look_network(Question(port=int(taken.getsockname()[1])), {})
    assert found.port_user is not None
    assert probes.look_network(ASKED, {}).port_user is None


def test_names_of_hosts_are_looked_up_here() -> None:
    found = probes.look_network(
        Question(others=("localhost", "no-such-host.invalid"), master="no-such-host.invalid"), {}
    )
    assert found.routes["no-such-host.invalid"] is None
    assert found.routes["localhost"] is not None
    assert not found.master_is_known


@contextmanager
def server(status: int) -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "problem"), [(200, None), (302, None), (404, None), (503, "503 Service Unavailable")]
)
def test_any_answer_but_a_broken_one_is_an_answer(status: int, problem: str | None) -> None:
    with server(status) as url:
        found = probes.reach(url, {})
    assert (found.problem, found.took_s is None) == (problem, problem is not None)


def test_an_address_that_never_answers_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        found = probes.reach(f"http://127.0.0.1:{silent.getsockname()[1]}", {}, 0.3)
    assert found.problem == "no answer within 0.3 s"


def test_a_proxy_is_gone_through_unless_excepted_and_its_password_never_told() -> None:
    through = {"http_proxy": "http://me:secret@127.0.0.1:9"}
    with server(200) as url:
        assert probes.reach(url, through).problem is not None
        assert probes.reach(url, {**through, "no_proxy": "127.0.0.1"}).problem is None
    found = probes.look_online(ASKED, {"HTTPS_PROXY": "http://me:secret@proxy:3128", "https_proxy": ""})
    assert found.proxies == {"https_proxy": "http://***@proxy:3128"}


def test_caches_are_where_the_hubs_keep_them(tmp_path: Path) -> None:
    found = probes.look_online(ASKED, {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"})
    assert found.caches["Hugging Face"].path == str(tmp_path / "hf" / "hub")
    assert found.is_offline


def test_folders_that_are_not_there_yet_count_as_their_parent(tmp_path: Path) -> None:
    found = probes.look_space(Question(folders={"output": str(tmp_path / "a" / "b")}), {})
    assert found.folders["output"].path == str(tmp_path / "a" / "b")
    assert found.folders["output"].free_bytes > 0


def test_a_lock_that_nobody_holds_is_found_and_one_that_is_held_is_not(tmp_path: Path) -> None:
    for op in ("cpu_adam", "some_op"):
        (tmp_path / op).mkdir()
        (tmp_path / op / "lock").touch()
    with (tmp_path / "cpu_adam" / "lock").open():
        found = probes.look_toolchain(ASKED, {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert [lock.path for lock in found.locks] == [str(tmp_path / "some_op" / "lock")]


def test_libaio_is_found_where_flags_point(tmp_path: Path) -> None:
    for name in ("libaio.h", "libaio.so"):
        (tmp_path / name).touch()
    flags = {"CFLAGS": f"-I{tmp_path}", "LDFLAGS": f"-L{tmp_path}"}
    found = probes.look_toolchain(ASKED, {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", **flags})
    assert found.has_libaio


def test_nvcc_is_the_one_that_pytorch_would_take(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin", "nvcc", "echo 'Cuda compilation tools, release 12.8, V12.8.93'")
    found = probes.look_software(ASKED, {"CUDA_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert (found.nvcc, found.nvcc_path) == ("12.8", str(tmp_path / "bin" / "nvcc"))
    assert probes.look_software(ASKED, {"CUDA_HOME": str(tmp_path / "no"), "PATH": "/usr/bin:/bin"}).nvcc_path is None


def test_versions_are_those_that_are_installed() -> None:
    found = probes.look_software(ASKED, {"PATH": "/usr/bin:/bin"})
    assert found.packages["deepspeed"] is not None
    assert ">=0.19.8" in found.ranges["deepspeed"]
    assert "3.12" in found.tested_pythons


def test_facts_travel_as_json() -> None:
    found = gather(Question(is_quick=True))
    assert found.failed == {}
    assert from_data(Facts, to_data(found), locate=lambda place: str(place)) == found


def test_a_quick_question_leaves_out_what_is_slow() -> None:
    found = gather(Question(is_quick=True))
    assert (found.online, found.topology) == (None, None)
    assert found.limits is not None


def test_every_look_has_a_field_for_what_it_finds() -> None:
    assert set(LOOKS) <= set(Facts.__dataclass_fields__)
