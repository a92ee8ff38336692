"""Variables by which a job from somebody else could run code."""

from __future__ import annotations

import pytest

from dstrain.job.code_variables import CODE_VARIABLES, HARMLESS, named_code

CODE = [
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "GCONV_PATH", "PATH", "HOME", "XDG_CACHE_HOME", "PYTHONPATH"),
    *("PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONWARNINGS", "PYTHONSAFEPATH", "PYTHONPYCACHEPREFIX"),
    *("BASH_ENV", "ENV", "PS4", "PERL5OPT", "NODE_OPTIONS", "GIT_SSH_COMMAND", "GIT_CONFIG_COUNT", "PAGER"),
    *("SSH_ASKPASS", "PDSH_MODULE_DIR", "OMPI_MCA_mca_base_component_path", "NCCL_NET_PLUGIN"),
    *("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "NCCL_ENV_PLUGIN", "NCCL_CONF_FILE", "CUDA_INJECTION64_PATH"),
    *("NVTX_INJECTION64_PATH", "CUDA_HOME", "NVCC_PREPEND_FLAGS", "CC", "CXX", "CXXFLAGS", "LDFLAGS", "CPATH"),
    *("CPLUS_INCLUDE_PATH", "COMPILER_PATH", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    *("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "TRITON_CACHE_MANAGER", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"),
    *("HF_MODULES_CACHE", "LOCAL_KERNELS", "DS_ENV_FILE"),
]
PLAIN = [
    *("DS_ACCELERATOR", "OMP_NUM_THREADS", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"),
    *("GLOO_SOCKET_IFNAME", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "HIP_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM", "PYTORCH_ALLOC_CONF"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "SWANLAB_API_KEY", "WANDB_PROJECT", "https_proxy", "LANG", "TZ"),
    *("TMPDIR", "PYTHONUNBUFFERED", "TRITON_INTERPRET", "TORCH_CUDA_ARCH_LIST", "MASTER_PORT"),
]


@pytest.mark.parametrize("name", CODE)
def test_a_variable_that_names_code_is_recognised(name: str) -> None:
    assert named_code(name)


@pytest.mark.parametrize("name", PLAIN)
def test_a_variable_of_training_is_not_taken_for_code(name: str) -> None:
    assert named_code(name) is None


def test_every_row_has_a_source_and_every_exception_a_row() -> None:
    assert all(names and what and source for names, what, source in CODE_VARIABLES)
    assert all(named_code(f"{name}_") or named_code(name.rstrip("TK") + "X") for name in HARMLESS)
