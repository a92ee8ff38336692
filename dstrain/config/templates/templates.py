"""Renders Jinja templates; the only importer of Jinja. Templates hold structure, and every value is escaped.

They render in Jinja's sandbox: a template may be untrusted, and can access only the values that it receives.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError, TemplateNotFound, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dstrain.config import jsonc
from dstrain.errors import InvalidConfig, did_you_mean
from dstrain.paths import shipped

_REASON = re.compile(r'\{#(?P<why>(?:(?!#\}).)*)#\}\s*"(?P<key>\w+)":', re.DOTALL)
"""A comment directly above a key."""


def _environment(folders: list[Path], escape: Callable[[Any], str] | None) -> Environment:
    return ImmutableSandboxedEnvironment(
        loader=FileSystemLoader(folders),
        undefined=StrictUndefined,
        finalize=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=escape is None,
    )


def _render(name: str, folders: list[Path], values: Mapping[str, Any], escape: Callable[[Any], str] | None) -> str:
    """Returns the text of a template; without `escape` every value is escaped as HTML."""
    try:
        return _environment(folders, escape).get_template(name).render(values)
    except TemplateNotFound as error:
        legal = [path.name for folder in folders for path in sorted(folder.glob("*.j2"))]
        raise InvalidConfig(f'unknown template "{error.name}"', hint=did_you_mean(str(error.name), legal)) from None
    except UndefinedError as error:
        hint = f"Known values: {', '.join(sorted(values))}"
        raise InvalidConfig(f"{_raised_at(error, name)}: {error.message}", hint=hint) from None
    except TemplateError as error:
        line, partial = getattr(error, "lineno", None), getattr(error, "name", None) or name
        raise InvalidConfig(f"{partial}{f':{line}' if line else ''}: {error.message}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        # the author of the template may be the user, so this is not a bug of dstrain
        raise InvalidConfig(f"{_raised_at(error, name)}: {type(error).__name__}: {error}") from None


def _raised_at(error: Exception, name: str) -> str:
    """Returns the template or partial, with the line, that raised an error; `name` if it is unknown."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(".j2")]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else name


def _json(value: Any) -> str:
    if isinstance(value, StrictUndefined):
        str(value)  # raises UndefinedError with the name
    return json.dumps(value, ensure_ascii=False)


def _shell(value: Any) -> str:
    return shlex.quote(str(value))


def config_folders(override: Path | None) -> list[Path]:
    """Returns the folders that are searched for DeepSpeed templates, the user's own first."""
    if override is not None and not any((override / path.name).is_file() for path in shipped("ds_templates").iterdir()):
        raise InvalidConfig(
            f"--template-dir {override}: the folder does not exist, or contains no template",
            hint=f"dstrain show template --dir {override}",
        )
    return [folder for folder in (override, shipped("ds_templates")) if folder is not None]


def render_json(name: str, values: Mapping[str, Any], *, override: Path | None = None) -> dict[str, Any]:
    """Returns the DeepSpeed configuration that a template makes from `values`.

    Raises InvalidConfig if a name is undefined, the result is not JSON, or a key is repeated.
    """
    text = _render(name, config_folders(override), values, _json)
    value = jsonc.parse(text, name).value
    if not isinstance(value, dict):
        raise InvalidConfig(f"{name}: the template makes a {type(value).__name__}, not an object")
    return value


def render_yaml(name: str, values: Mapping[str, Any]) -> str:
    """Returns the text of a job file; JSON values are YAML values."""
    return _render(name, [shipped("launch")], values, _json)


def render_script(name: str, values: Mapping[str, Any]) -> str:
    """Returns the text of a shell script; every value is quoted for the shell."""
    return _render(name, [shipped("launch")], values, _shell)


def render_page(template: Path, values: Mapping[str, Any]) -> str:
    """Returns the text of an HTML page; every value is escaped for HTML."""
    return _render(template.name, [template.parent], values, None)


def template_texts(names: Iterable[str], *, override: Path | None = None) -> dict[str, str]:
    """Returns the texts of templates and of the partials they include, by name."""
    texts: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        if name in texts:
            continue
        path = next((folder / name for folder in config_folders(override) if (folder / name).is_file()), None)
        if path is None:
            raise InvalidConfig(f'unknown template "{name}"', hint=did_you_mean(name, template_names()))
        texts[name] = path.read_text(encoding="utf-8")
        waiting += re.findall(r'{%-?\s*include\s+"([^"]+)"', texts[name])
    return texts


def reasons_in(name: str) -> dict[str, str]:
    """Returns why a template and its partials write a key: key name → the comment directly above its line.

    The first comment of a file describes the file.
    """
    texts = template_texts([name]).values()
    matches = [match for text in texts for match in _REASON.finditer(text, 1)]
    return {match["key"]: " ".join(match["why"].split()) for match in matches}


def template_hash(name: str, *, override: Path | None = None) -> str:
    """Returns the SHA-256 of a template with its partials."""
    texts = template_texts([name], override=override)
    return hashlib.sha256("".join(f"{key}\n{texts[key]}" for key in sorted(texts)).encode()).hexdigest()


def template_names() -> list[str]:
    """Returns the shipped DeepSpeed templates, without the partials."""
    return sorted(path.name for path in shipped("ds_templates").glob("*.json.j2") if not path.name.startswith("_"))
