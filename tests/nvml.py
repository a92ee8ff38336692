"""NVML for machines without a driver: a library that NVIDIA's own bindings load, with the GPUs that a test names."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import pytest

from dstrain.facts import probe

_VARIABLE = "NVML_GPUS"
_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char name[96];
    unsigned long long mib;
    unsigned cores, sm_mhz, memory_mhz, bus_bits;
    int major, minor;
} Gpu;

static int read_gpu(unsigned wanted, Gpu *gpu) {
    const char *line = getenv("NVML_GPUS");
    for (unsigned number = 0; line != NULL && *line != 0; number++) {
        if (number == wanted)
            return sscanf(line, "%95[^|]|%llu|%u|%u|%u|%u|%d|%d", gpu->name, &gpu->mib, &gpu->cores, &gpu->sm_mhz,
                          &gpu->memory_mhz, &gpu->bus_bits, &gpu->major, &gpu->minor) == 8 ? 0 : 999;
        line = strchr(line, '\n');
        if (line != NULL) line++;
    }
    return 6;
}
#define OF_GPU(name, ...) int name(void *handle, __VA_ARGS__) { \
    Gpu gpu; if (read_gpu((unsigned)(size_t)handle - 1, &gpu) != 0) return 999;

int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "an error"; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    Gpu gpu;
    for (*count = 0; read_gpu(*count, &gpu) == 0; ++*count) {}
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **handle) { *handle = (void *)(size_t)(number + 1); return 0; }
OF_GPU(nvmlDeviceGetName, char *text, unsigned size) snprintf(text, size, "%s", gpu.name); return 0; }
OF_GPU(nvmlDeviceGetUUID, char *text, unsigned size) snprintf(text, size, "GPU-%zu", (size_t)handle); return 0; }
OF_GPU(nvmlDeviceGetMemoryInfo, unsigned long long *bytes)
    bytes[0] = gpu.mib << 20; return gpu.mib ? 0 : 3; }
OF_GPU(nvmlDeviceGetNumGpuCores, unsigned *cores) *cores = gpu.cores; return gpu.cores ? 0 : 3; }
OF_GPU(nvmlDeviceGetMaxClockInfo, int type, unsigned *mhz) *mhz = type == 2 ? gpu.memory_mhz : gpu.sm_mhz; return 0; }
OF_GPU(nvmlDeviceGetMemoryBusWidth, unsigned *bits) *bits = gpu.bus_bits; return 0; }
OF_GPU(nvmlDeviceGetCudaComputeCapability, int *major, int *minor) *major = gpu.major; *minor = gpu.minor; return 0; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as NVML reports it; by default one that is not in the table. 0: NVML does not say."""

    name: str = "NVIDIA GeForce RTX 5070 Plus"
    memory_mib: int = 12227
    num_cores: int = 6144
    sm_clock_mhz: int = 2512
    memory_clock_mhz: int = 14001
    memory_bus_bits: int = 192
    compute_capability: tuple[int, int] = (12, 0)

    def __str__(self) -> str:
        clocks = (self.num_cores, self.sm_clock_mhz, self.memory_clock_mhz, self.memory_bus_bits)
        return "|".join(map(str, (self.name, self.memory_mib, *clocks, *self.compute_capability)))


Machine = Callable[..., None]
"""Puts GPUs into this machine, in place of those that it has."""


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", path], input=_SOURCE, text=True, check=True)
    return path


@pytest.fixture
def machine(nvml_library: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this a machine without GPUs; what is returned puts GPUs into it."""

    def install(*gpus: Gpu) -> None:
        monkeypatch.setenv(_VARIABLE, "\n".join(map(str, gpus)))

    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(nvml_library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(probe, "_DRIVERS", (str(nvml_library),))
    install()
    return install
