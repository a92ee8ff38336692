"""Decides which environment variables reach the ranks: by their agents, and secrets by a 0600 file.

Agents get the text of each value as it stands between double quotes in a shell, and expand it without one (`expanded`).
The same texts are in the environment file, whose lines `start.sh` evaluates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import dstrain
from dstrain.errors import InvalidConfig
from dstrain.job.code_variables import is_secret as is_secret
from dstrain.job.code_variables import refuse_code
from dstrain.job.yaml_source import parse_yaml
from dstrain.paths import shown, write_atomic
from dstrain.rundir import RunDir

FORWARDED_PREFIXES = (
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "MODELSCOPE_", "SWANLAB_", "WANDB_", "MLFLOW_", "AWS_",
    "NCCL_", "GLOO_", "UCX_", "OMP_", "TORCH_", "PYTORCH_", "DS_", "DEEPSPEED_",
)  # fmt: skip
"""Prefixes of the variables that go from this shell to every node; secret ones go through the secrets file."""

FORWARDED_NAMES = frozenset(
    {"CUDA_HOME", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "TOKENIZERS_PARALLELISM"}
)
"""Further variables that go to every node."""

STAYING_NAMES = frozenset({"DS_ENV_FILE"})
"""Variables that concern the launcher alone."""

RANK_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables that the launcher sets for each rank; leftovers of another launcher must not be there first."""

_LAUNCHER_EXPORTS = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LINE_BREAKS = {"\"$'\\n'\"": "\n", "\"$'\\r'\"": "\r"}
_APART = str.maketrans({value: text for text, value in _LINE_BREAKS.items()})
_COMMAND = re.compile(r"(?:^|[^\\])(?:\\\\)*(\$\(.*\)?|`[^`]*`?|\$\{(?![A-Za-z_]\w*\}).*?(?:\}|$))", re.ASCII)
"""Expansions that only a shell can do."""
_PARTS = re.compile(r'\\([\\$`"])|\$(?:([A-Za-z_]\w*)|{([A-Za-z_]\w*)})|"(?:\$\'\\[nr]\')?"', re.ASCII)
"""Characters with a special meaning between double quotes, in the texts that this module makes."""

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Keeps the current folder out of the module path of Python and its children."""


def refuse_secrets(overrides: Iterable[str], why: str) -> None:
    """Raises InvalidConfig if a `key=value` of the command line is or holds a secret."""
    for override in overrides:
        key, _, text = override.partition("=")
        name = key.strip().rpartition(".")[2]
        value = parse_yaml(text, "--set")[0] if name == "env" else None
        given = value if isinstance(value, Mapping) else {name: text}
        for secret in (name for name, worth in given.items() if is_secret(name, str(worth))):
            raise InvalidConfig(
                f"--set {key}: {secret} is a secret, and {why}",
                hint=f"export {secret}=… in this shell, or write it under `env:` in the job file.",
            )


def is_forwarded(name: str) -> bool:
    """Returns whether a variable of this shell goes to the other nodes."""
    return name not in STAYING_NAMES and (name.startswith(FORWARDED_PREFIXES) or name in FORWARDED_NAMES)


def for_nodes(env: Mapping[str, str], job_env: Mapping[str, str], user_file_text: str = "") -> dict[str, str]:
    """Returns the variables of every node, without secrets: name → text between double quotes in a shell.

    The job wins over the user's `.deepspeed_env`, which wins over the launcher's environment `env`. In the user's file
    `$NAME` still means the node's own value, as it does when the launcher reads it.
    """
    _require_names(job_env)
    texts = {
        name: between_quotes(value)
        for name, value in env.items()
        if (is_forwarded(name) or name.startswith(_LAUNCHER_EXPORTS))
        and _NAME.fullmatch(name)
        and not is_secret(name, value)
    }
    for _, name, raw in _user_lines(user_file_text):
        if is_secret(name, raw):
            texts.pop(name, None)
        else:
            texts[name] = _user_value(raw)
    for name, value in job_env.items():
        texts.pop(name, None)
        if not is_secret(name, value):
            texts[name] = between_quotes(value)
    return dict(sorted(texts.items()))


def file_text(texts: Mapping[str, str]) -> str:
    """Returns the environment file that `start.sh` reads."""
    return "".join(f"{name}={text}\n" for name, text in sorted(texts.items()))


def expanded(texts: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    r"""Expands the texts as a shell with the environment `own` does, one after the other; without a shell.

    >>> expanded({"A": r"\$1 $B", "PATH": "/x:$PATH"}, {"B": "; id", "PATH": "/bin"})
    {'A': '$1 ; id', 'PATH': '/x:/bin'}
    """
    values = dict(own)
    for name, text in texts.items():
        values[name] = _PARTS.sub(lambda part: _value(part, values), text)
    return {name: values[name] for name in texts}


def _value(part: re.Match[str], values: Mapping[str, str]) -> str:
    name = part[2] or part[3]
    return values.get(name, "") if name else part[1] or _LINE_BREAKS.get(part[0], "")


def secrets(env: Mapping[str, str], job_env: Mapping[str, str], user_file_text: str = "") -> dict[str, str]:
    """Returns the secrets that the ranks need, by name. Raises InvalidConfig for one with a line break."""
    _require_names(job_env)
    prefixes = (*FORWARDED_PREFIXES, *_LAUNCHER_EXPORTS)
    values = {name: value for name, value in env.items() if name.startswith(prefixes) and is_secret(name, value)}
    values.update({name: _literal(raw) for _, name, raw in _user_lines(user_file_text) if is_secret(name, raw)})
    values.update({name: value for name, value in job_env.items() if is_secret(name, value)})
    for name, value in values.items():
        _require_one_line(name, value)
    return values


def exports(job_env: Mapping[str, str], python_path: str) -> dict[str, str]:
    """Returns the launcher's variables beside the shell's own: the same for `run` and for `start.sh`."""
    plain = {name: value for name, value in job_env.items() if not is_secret(name, value)}
    extra = {"PYTHONPATH": python_path} if python_path else {}
    return {**extra, **SAFE_PATH, **plain}


def launcher_environment(
    env: Mapping[str, str], exported: Mapping[str, str], carried_secrets: Mapping[str, str]
) -> dict[str, str]:
    """Returns the launcher's environment, without secrets: the launcher prints some variables and exports some."""
    dropped = {*carried_secrets, *RANK_NAMES}
    return {**{name: value for name, value in env.items() if name not in dropped}, **exported}


def python_path(env: Mapping[str, str]) -> str:
    """Returns the PYTHONPATH of the ranks, which run in the run directory: absolute, and with a checkout's root."""
    given = [str(Path(entry).absolute()) for entry in env.get("PYTHONPATH", "").split(":") if entry]
    root = checkout()
    return ":".join(dict.fromkeys([*([str(root)] if root else []), *given]))


def synced_python_path(run_dir: RunDir, path: str) -> str:
    """Returns the PYTHONPATH of a run that copies a checkout to its nodes; this machine has no such copy.

    >>> synced_python_path(RunDir(Path("/run")), "/of/the/user")
    '/of/the/user'
    """
    root = checkout()
    return f"{run_dir.code}:{path}" if root is not None and str(root) in path.split(":") else path


def checkout() -> Path | None:
    """Returns the checkout that contains this code; None if dstrain is installed."""
    root = Path(dstrain.__file__).resolve().parents[1]
    return None if root.name in {"site-packages", "dist-packages"} else root


def user_files(env: Mapping[str, str], *, home: Path, folder: Path) -> list[Path]:
    """Returns the user's own environment files, where the launcher would look for them; they need not exist."""
    name = env.get("DS_ENV_FILE", ".deepspeed_env")
    return list(dict.fromkeys((home / name, folder / name)))


def read_user_files(env: Mapping[str, str], *, home: Path, folder: Path) -> str:
    """Returns the text of the user's own environment files.

    Raises InvalidConfig for variables that could run code in a file that came with the folder.
    """
    texts = []
    for file in user_files(env, home=home, folder=folder):
        if file.is_file():
            texts.append(file.read_text(encoding="utf-8", errors="surrogateescape"))
            if file.parent != home and "DS_ENV_FILE" not in env:  # neither the user's folder nor named by the user
                refuse_code((name, f"{shown(str(file))}:{line}") for line, name, _ in _user_lines(texts[-1]))
    return "\n".join(texts)


def write_secrets(run_dir: RunDir, values: Mapping[str, str]) -> None:
    """Writes the secrets for the ranks, readable by their user alone."""
    text = "".join(f"{name}={value}\n" for name, value in sorted(values.items()))
    write_atomic(run_dir.secrets, text, mode=0o600)


def _require_names(job_env: Mapping[str, str]) -> None:
    wrong = [name for name in job_env if not _NAME.fullmatch(name)]
    if wrong:
        raise InvalidConfig(
            "\n".join(f'env: "{name}" is not a valid name of an environment variable' for name in wrong)
        )


def _require_one_line(name: str, value: str) -> None:
    if "\n" in value or "\r" in value:
        problem = f"the environment variable {name} holds a line break, which cannot be passed to the ranks"
        raise InvalidConfig(problem, hint=f"Put it into a file and let the variable name the file, or `unset {name}`.")


def between_quotes(value: str) -> str:
    """Escapes `value` for double quotes in a shell.

    A line break stands outside of them, as `$'\\n'`, so that each text is one line.
    """
    return re.sub(r'([\\$`"])', r"\\\1", value).translate(_APART)


def _user_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields lines, names and raw values of a `.deepspeed_env`; blank lines, comments and `export` are let pass."""
    for number, raw in enumerate(re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff")), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").partition("=")
        where = f".deepspeed_env:{number}: "
        if not equals or not _NAME.fullmatch(name.strip()):
            given = f'"{name.strip()}"' if equals else "it"
            raise InvalidConfig(f"{where}{given} is not NAME=value", hint="Correct or remove the line.")
        # in single quotes, and in a secret, which is passed on as it is, `$` has no meaning
        is_literal = _is_quoted(value.strip(), "'") or is_secret(name.strip(), value.strip())
        if command := None if is_literal else _COMMAND.search(value):
            raise InvalidConfig(
                f"{where}{name.strip()} holds {command[1]}, which only a shell could expand",
                hint="Write the value itself. $NAME is the node's own variable; \\$ and \\` stand for themselves.",
            )
        yield number, name.strip(), value.strip()


def _user_value(raw: str) -> str:
    """Escapes a value of the user's file for double quotes; `$NAME` stays as it is."""
    if _is_quoted(raw, "'"):
        return between_quotes(raw[1:-1])
    text, made, at = raw[1:-1] if _is_quoted(raw, '"') else raw, "", 0
    for part in _PARTS.finditer(text):
        made += between_quotes(text[at : part.start()]) + part[0]
        at = part.end()
    return made + between_quotes(text[at:])


def _is_quoted(raw: str, quote: str) -> bool:
    return len(raw) > 1 and raw[0] == raw[-1] == quote


def _literal(raw: str) -> str:
    return raw[1:-1] if _is_quoted(raw, "'") or _is_quoted(raw, '"') else raw
