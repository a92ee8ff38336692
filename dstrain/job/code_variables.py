"""Environment variables by which a job could run code, and those that hold secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from fnmatch import fnmatchcase

from dstrain.errors import InvalidConfig, Place

TRUSTED: ContextVar[bool] = ContextVar("TRUSTED", default=False)
"""Whether the user trusts the job and the files beside it (`--trust-job`)."""

CODE_VARIABLES: tuple[tuple[str, str, str], ...] = (
    ("LD_*", "libraries that every program loads", "ld.so(8)"),
    ("GCONV_PATH", "libraries that convert character sets", "glibc: iconv/gconv_conf.c"),
    ("PATH HOME SHELL", "the programs and start-up files that are found", "environ(7)"),
    ("XDG_CACHE_HOME XDG_CONFIG_HOME", "caches of compiled extensions, and settings", "XDG Base Directory 0.8"),
    ("PYTHON*", "modules that every Python imports", "Python: using/cmdline.rst, Environment variables"),
    ("BASH_ENV ENV SHELLOPTS BASHOPTS PS4 PROMPT_COMMAND ZDOTDIR", "commands that a shell runs", "bash(1), zsh(1)"),
    ("PERL5* PERLLIB RUBYOPT RUBYLIB NODE_OPTIONS NODE_PATH", "modules of tools", "perlrun(1), ruby(1), node(1)"),
    ("*JAVA_OPTIONS JAVA_TOOL_OPTIONS CLASSPATH", "agents of Java's machine", "JDK: java(1)"),
    ("GIT_*", "programs that git starts, which trackers ask for the commit", "git(1), Environment Variables"),
    ("PAGER EDITOR VISUAL BROWSER LESSOPEN LESSCLOSE", "programs that tools start", "environ(7), less(1)"),
    ("SSH_ASKPASS* RSYNC_*", "programs that ssh and rsync start", "ssh(1), rsync(1)"),
    ("PDSH_* OMPI_* OPAL_* PMIX_* PRTE_* HYDRA_* MPIEXEC_* SLURM_*", "modules and programs of launchers",
        "pdsh(1), mpirun(1), srun(1)"),
    ("UCX_MODULE* FI_PROVIDER_PATH", "libraries of the network", "UCX: ucs/config/global_opts.c, fabric(7)"),
    ("NCCL_*PLUGIN* NCCL_CONF_FILE RCCL_*PLUGIN*", "libraries that NCCL loads", "NCCL user guide, env.html"),
    ("*_INJECTION*_PATH HSA_TOOLS_LIB ROCP_TOOL_LIB*", "libraries that the GPU's driver loads",
        "CUPTI user guide, Injection; NVTX: nvtxInit.h; ROCR-Runtime: runtime.cpp"),
    ("CUDA_HOME CUDA_PATH CUDA_INC_PATH CUDACXX CUDAHOSTCXX PYTORCH_NVCC NVCC_* CUTLASS_PATH ROCM_HOME ROCM_PATH"
        " HIP_PATH HIP_CLANG_PATH HIPCC_*", "compilers of GPU code",
        "torch 2.13 utils/cpp_extension.py: _find_cuda_home; nvcc user guide, 4.1"),
    ("CC CXX CPP LD AR AS NM *FLAGS CPATH *_INCLUDE_PATH LIBRARY_PATH COMPILER_PATH GCC_* CCACHE_* NINJA_* CMAKE_*",
        "compilers, their options and what they include", "gcc(1), Environment; torch 2.13 utils/cpp_extension.py"),
    ("TORCH_EXTENSIONS_DIR TORCHINDUCTOR_*DIR PYTORCH_KERNEL_CACHE_PATH", "compiled code that PyTorch loads",
        "torch 2.13 utils/cpp_extension.py, _inductor/runtime/cache_dir_utils.py"),
    ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "pickles that run code", "torch 2.13 serialization.py"),
    ("TRITON_*", "caches and programs of Triton", "triton 3.8 knobs.py"),
    ("HF_MODULES_CACHE LOCAL_KERNELS KERNELS_CACHE HF_KERNELS_CACHE", "modules and kernels that are imported",
        "huggingface_hub 2.4, Transformers 5.23 utils/hub.py; kernels 0.18 utils.py"),
    ("DS_ENV_FILE", "another file of variables", "deepspeed 0.19.8 launcher/runner.py"),
)  # fmt: skip
"""Patterns of names, what their values name, and the source."""
HARMLESS = frozenset(
    {
        *("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONUTF8"),
        *("PYTHONIOENCODING", "PYTHONOPTIMIZE", "PYTHONMALLOC", "PYTHONTRACEMALLOC", "PYTHONNOUSERSITE"),
        *("TRITON_INTERPRET", "TRITON_PRINT_AUTOTUNING", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"),
    }
)
"""Names that match a pattern, but whose values are numbers or switches."""


def named_code(name: str) -> str | None:
    """Returns the possible code that a variable's value names; None for any other variable.

    >>> named_code("LD_PRELOAD"), named_code("NCCL_DEBUG"), named_code("PYTHONUNBUFFERED")
    ('libraries that every program loads', None, None)
    """
    upper = name.upper()  # some tools read names in small letters
    matching = (what for names, what, _ in CODE_VARIABLES if any(fnmatchcase(upper, each) for each in names.split()))
    return None if name in HARMLESS else next(matching, None)


def refuse_code(variables: Iterable[tuple[str, Place | str]]) -> None:
    """Raises InvalidConfig for variables, by name and place, that could run code, unless the user trusts the job."""
    if TRUSTED.get():
        return
    found = [(name, place, what) for name, place in variables if (what := named_code(name)) is not None]
    if found:
        raise InvalidConfig(
            "\n".join(f"{place}: {name} may run code: it names {what}" for name, place, what in found),
            hint="If you wrote it: --trust-job, or export it in your own shell. If not, read what it names first.",
        )


_SECRET_WORD = re.compile(
    r"(^|_)(TOKEN|(?-i:TOKENS)|API_?KEYS?|ACCESS_?KEYS?|SECRET_?KEYS?|PRIVATE_?KEYS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE"
    r"|WEBHOOKS?|CREDENTIALS?|SWANLAB_NOTIFY)(_|$)",
    re.IGNORECASE,
)
_USER_AND_PASSWORD = re.compile(r"://[^/@\s:]*:[^/@\s]+@")


def is_secret(name: str, value: str = "") -> bool:
    """Returns whether a variable is a secret, by its name or by a password in an address.

    Names in small letters that end in `tokens` are numbers or lists of tokens, in a job or a DeepSpeed configuration.

    >>> is_secret("HF_TOKEN"), is_secret("TOKENIZERS_PARALLELISM"), is_secret("PROXY", "http://me:pw@host")
    (True, False, True)
    >>> is_secret("API_TOKENS"), is_secret("new_tokens")
    (True, False)
    """
    return _SECRET_WORD.search(name) is not None or _USER_AND_PASSWORD.search(value) is not None
