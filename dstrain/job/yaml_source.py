"""Converts YAML text to plain values and back, with the position of every key."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.composer import ComposerError
from ruamel.yaml.constructor import ConstructorError, DuplicateKeyError, RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from dstrain.errors import InvalidConfig, Place, merge_hint
from dstrain.records import Keys, Locator


class _Constructor(RoundTripConstructor):
    """ruamel's constructor, with the place of scalars that have no Python value, such as the date 2024-13-45."""

    texts: frozenset[str] = frozenset()

    def construct_document(self, node: Any) -> Any:
        for key, value in node.value if isinstance(node, MappingNode) else ():
            if isinstance(key, ScalarNode) and key.value in self.texts and isinstance(value, MappingNode):
                for _, item in value.value:
                    if isinstance(item, ScalarNode) and item.tag != _TAG + "null":
                        item.tag = _TAG + "str"
        return super().construct_document(node)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError) as error:
            shown = str(node.value)[:40] if isinstance(node, ScalarNode) else "this"
            kind = str(node.tag).removeprefix(_TAG)
            reason = "" if isinstance(error, KeyError) else f" ({error})"
            problem = f"{shown} is not a valid {kind}{reason}; in quotes it is text"
            raise ConstructorError(None, None, problem, node.start_mark) from None


_MOST_CHARACTERS = 2**18
_MOST_VALUES = 2**17
_TAG = "tag:yaml.org,2002:"


def parse_yaml(text: str, name: str, *, texts: frozenset[str] = frozenset()) -> tuple[Any, Locator]:
    """Returns the plain value of a YAML 1.2 text (`1e-5` is a number) and a function that returns the place of a key.

    Scalars directly below the top-level keys in `texts` are text, exactly as written (`4` is "4"). Raises InvalidConfig
    with its place for a syntax error, a duplicate key, or an illegal value (the date 2024-13-45).
    """
    if len(text) > _MOST_CHARACTERS:
        raise InvalidConfig(f"{name}: has {len(text):,} characters; the limit is {_MOST_CHARACTERS:,}")
    # the other readers are faster, and keep no places
    reader = YAML(typ="rt", pure=True)
    reader.Constructor = type("_Constructor", (_Constructor,), {"texts": texts})
    try:
        document = reader.load(io.StringIO(text.removeprefix("\ufeff")))
        plain = _plain(document, budget=itertools.count())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(file=name, line=mark.line + 1, column=mark.column + 1) if mark else Place(file=name)
        problem = (error.problem or "not valid YAML").split("\n")[0]
        raise InvalidConfig(problem, place=place, hint=_hint(text, error)) from None
    except YAMLError as error:
        problem = str(error).split("\n")[0]
        raise InvalidConfig(f"{name}: {problem}", hint="Save the file as plain text, in UTF-8.") from None
    except NotImplementedError:  # ruamel's own, for some comments around a value on a line of its own
        raise InvalidConfig(f"{name}: has a comment between a key and its value; write them on one line") from None
    except RecursionError:
        raise InvalidConfig(f"{name}: is nested too deeply") from None
    except OverflowError:
        problem = f"its aliases (*name) expand to more than {_MOST_VALUES:,} values"
        raise InvalidConfig(f"{name}: {problem}", hint="Write the values themselves.") from None

    def locate(keys: Keys) -> Place:
        line, column = _mark(document, keys)
        return Place(file=name, line=line + 1, column=column + 1)

    return plain, locate


def _hint(text: str, error: MarkedYAMLError) -> str:
    """Returns the hint for a text that is not YAML."""
    merging = merge_hint(text)
    if merging is not None:
        return merging
    if isinstance(error, DuplicateKeyError):
        return "Remove one of the two lines."
    if isinstance(error, ComposerError):
        return "Keep one document: remove the line --- and the other document." if "\n---" in text else _FORM
    mark = error.problem_mark
    line = text.split("\n")[mark.line] if mark is not None and mark.line < text.count("\n") + 1 else ""
    return "Replace the tab by spaces." if "\t" in line else _FORM


_FORM = "A line is `key: value`; quote values with a colon, a # or brackets."


def compose_yaml(text: str) -> Node | None:
    """Returns the nodes of a YAML text, with their offsets in it; None if it is empty.

    Raises InvalidConfig if it does not parse, as after an edit that removes an anchor.
    """
    try:
        node: Node | None = YAML(typ="safe", pure=True).compose(io.StringIO(text))
    except YAMLError as error:
        raise InvalidConfig(str(error).split("\n")[0]) from None
    return node


def _mark(node: Any, keys: Keys) -> tuple[int, int]:
    """Returns the zero-based line and column of the last of these keys that exists."""
    mark = (0, 0)
    for key in keys:
        try:
            if isinstance(node, CommentedMap):
                mark = node.lc.key(key) or mark  # None of an empty mapping
            elif isinstance(node, CommentedSeq):
                mark = node.lc.item(key) or mark
            node = node[key]
        except (KeyError, IndexError, TypeError):
            break
    return mark


def _plain(node: Any, budget: Iterator[int]) -> Any:
    """Returns a plain value. Raises OverflowError if aliases expand to more than `_MOST_VALUES` values."""
    if next(budget) > _MOST_VALUES:
        raise OverflowError
    if isinstance(node, Mapping):
        return {str(key): _plain(value, budget) for key, value in node.items()}
    if isinstance(node, Sequence) and not isinstance(node, str):
        return [_plain(value, budget) for value in node]
    if isinstance(node, bool) or node is None:
        return node
    for plain in (int, float, str):
        if isinstance(node, plain):
            return plain(node)
    return node
