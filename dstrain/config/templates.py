"""Renders Jinja templates; the only importer of Jinja. Templates hold structure, and every value is escaped.

They render in Jinja's sandbox: a template may be untrusted, and can access only the values that it receives. Chat
templates render as in Transformers, without importing it: to learn how long a few rows are.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jinja2 import (
    Environment,
    FileSystemLoader,
    StrictUndefined,
    TemplateError,
    TemplateNotFound,
    UndefinedError,
    nodes,
)
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dstrain.config import jsonc
from dstrain.errors import InvalidConfig, did_you_mean
from dstrain.paths import shipped

_REASON = re.compile(r'\{#(?P<why>(?:(?!#\}).)*)#\}\s*"(?P<key>\w+)":', re.DOTALL)
"""A comment directly above a key."""


@cache  # it keeps the templates that it has compiled, and compiles a file again that has changed
def _environment(folders: tuple[Path, ...], escape: Callable[[Any], str] | None) -> Environment:
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
        return _environment(tuple(folders), escape).get_template(name).render(values)
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
    value = jsonc.parse(_render(name, config_folders(override), values, _json), name).value
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


_START, _END = "\U0010fffe", "\U0010ffff"
"""Characters around what `{% generation %}` writes; texts have none of them."""
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Generation(Extension):
    """The tag `{% generation %}`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    @staticmethod
    def _marked(caller: Any) -> str:
        return f"{_START}{caller()}{_END}"


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatTemplate:
    """A chat template with the special tokens that it may write; it stands for a tokenizer where rows are rendered.

    Source: transformers 5.23 utils/chat_template_utils.py: render_jinja_template.
    """

    chat_template: str | Mapping[str, str]
    """Its text, or the texts of several by name."""
    special_tokens: Mapping[str, str]
    """Such as `bos_token`."""
    token_id: Callable[[str], int | None]
    """Returns the id of a token; None if the tokenizer has none of that text."""
    unk_token_id: None = None

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text."""
        return self.special_tokens.get("eos_token")

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Returns the id of a token, or None."""
        return self.token_id(token)

    def get_chat_template(self, tools: Any = None) -> str:
        """Returns the text: that for tools if there are any and it exists."""
        if isinstance(self.chat_template, str):
            return self.chat_template
        name = "tool_use" if tools and "tool_use" in self.chat_template else "default"
        return self.chat_template[name]

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        return environment

    @cached_property
    def _compiled(self) -> dict[str, Any]:
        return {}

    def apply_chat_template(
        self, chats: Sequence[Sequence[Mapping[str, Any]]], *, tools: Any = None, tokenize: bool = False, **options: Any
    ) -> Any:
        """Returns the text of each conversation, or of a single one."""
        is_single = bool(chats) and isinstance(chats[0], Mapping)
        texts, _ = self.tagged([chats] if is_single else chats, tools, options)
        return texts[0] if is_single else texts

    def tagged(self, chats: Any, tools: Any, options: Mapping[str, Any]) -> Any:
        """Returns texts, and the stretches that `{% generation %}` marks."""
        texts, marked = [], []
        for chat in chats:
            text, spans = "", list[tuple[int, int]]()
            for piece, is_marked in self._pieces(chat, tools, options):
                if is_marked:
                    spans.append((len(text), len(text) + len(piece)))
                text += piece
            texts.append(text)
            marked.append(spans)
        return texts, marked

    def _pieces(self, chat: Any, tools: Any, options: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
        """Yields the pieces of a rendered conversation, and whether `{% generation %}` marks them."""
        text = self.get_chat_template(tools)
        if text not in self._compiled:
            self._compiled[text] = self._environment.from_string(text)
        values = {"add_generation_prompt": False, "documents": None, **self.special_tokens, **options}
        written = self._compiled[text].render(messages=[_aliased(one) for one in chat], tools=tools, **values)
        for number, piece in enumerate(written.split(_START)):
            marked, _, rest = piece.partition(_END) if number else ("", "", piece)
            if number:
                yield marked, True
            yield rest, False


def _aliased(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose thoughts stand under all names that templates read."""
    thought = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return dict(message) if thought is None else {"thinking": thought, **message, "reasoning_content": thought}
