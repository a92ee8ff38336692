"""Applies chat templates as Transformers does, without importing it: to learn how long a few rows are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
