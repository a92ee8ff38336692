"""Reads a model's config.json from the local cache, the Hugging Face hub or ModelScope.

It uses the standard library: importing huggingface_hub takes longer than everything else here.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dstrain.choices import Hub
from dstrain.errors import DstrainError, EnvironmentProblem, InvalidConfig
from dstrain.facts.this_machine import hf_home, hf_hub_cache, is_hub_offline

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
"""Files of a model."""
OFFLINE = "HF_HUB_OFFLINE"
"""The variable with which Transformers, datasets and kernels read the cache of the Hugging Face hub alone."""
TIMEOUT_S = 10.0
MAX_BYTES = 8 * 2**20
_MOST = 2**48
_MOST_PARTS = 2**14
"""Largest plausible number of layers, or of experts per layer."""
_PARTS = re.compile(r"(^|_)(layers?|depths?|blocks|experts)$")

_DOWNLOADS = {Hub.HF: "hf download {0} config.json", Hub.MODELSCOPE: "modelscope download --model {0} config.json"}
_OTHER = {Hub.HF: "modelscope", Hub.MODELSCOPE: "hf"}


def is_hub_id(name: str) -> bool:
    """Returns whether the name has the form `org/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name, re.ASCII) is not None


def fetch_config(model_id: str, hub: Hub, *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Returns the config.json of `org/name`, from the hub's cache on this machine or from the hub.

    Raises InvalidConfig if the hub has no such model, EnvironmentProblem if the hub cannot be reached.
    """
    cached = cached_file(model_id, hub)
    if cached is not None:
        return parse_config(cached.read_text(encoding="utf-8"), str(cached))
    download = _DOWNLOADS[hub].format(model_id)
    if hub is Hub.HF and is_hub_offline(os.environ):
        raise EnvironmentProblem(
            f'"{model_id}" is not in the cache, and HF_HUB_OFFLINE is set',
            hint=f"Type `unset HF_HUB_OFFLINE`, or with a network connection `{download}`.",
        )
    url = _url(model_id, hub)
    try:
        body = _download(url, hub, timeout_s)
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            raise _refusal(error, model_id, hub) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        variable = "HF_ENDPOINT" if hub is Hub.HF else "MODELSCOPE_ENDPOINT"
        raise EnvironmentProblem(
            f"{url}: connection failed: {reason}",
            hint=f"Give a local folder, set {variable} to a mirror, or use `--hub {_OTHER[hub]}`.",
        ) from None
    # proxies and login pages answer any address, with a page of their own and status 200
    try:
        return parse_config(body.decode("utf-8"), url)
    except (InvalidConfig, UnicodeDecodeError):
        raise EnvironmentProblem(
            f"{url}: the response is not a config.json (a proxy or a login page?): {body[:60]!r}",
            hint=f"See `curl -L {url}`, or give a local folder.",
        ) from None


def is_reached(source: str, hub: Hub, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Returns whether Transformers may ask the hub for a model; if not, its cache is all there is.

    It would ask for each file again and again, for minutes. True also of a folder, and if HF_HUB_OFFLINE is set. Raises
    as `fetch_config` does for a model that is not in the cache.
    """
    if not is_hub_id(source) or Path(source).exists():
        return True
    if cached_file(source, hub) is None:
        fetch_config(source, hub, timeout_s=timeout_s)
    elif hub is Hub.HF and not is_hub_offline(os.environ):
        try:
            _download(_url(source, hub), hub, timeout_s)
        except urllib.error.HTTPError as error:
            error.close()
        except (OSError, http.client.HTTPException, ValueError):
            return False
    return True


def for_child(source: str, hub: Hub) -> tuple[dict[str, str], str | None]:
    """Returns the environment of a child process that loads a model, and a note if that reads the cache alone.

    Raises as `is_reached` does.
    """
    if is_reached(source, hub):
        return dict(os.environ), None
    return {**os.environ, OFFLINE: "1"}, offline_note(source)


def has_data_set(name: str) -> bool:
    """Returns whether the cache has files of a data set on the Hugging Face hub."""
    return any((_hf_folder("datasets", name) / "snapshots").glob("*/*"))


def offline_note(source: str) -> str:
    """Returns a line about a model of which only the cache is read."""
    return f"{_endpoint(Hub.HF)} cannot be reached: {source} is read from the cache"


def parse_config(text: str, name: str) -> dict[str, Any]:
    """Returns the object in a config.json's text. Raises InvalidConfig with file:line:column, or with the key of an
    implausible number."""
    try:
        config = json.loads(text.removeprefix("\ufeff"))
        _require_sizes(config, name)
    except json.JSONDecodeError as error:
        raise InvalidConfig(
            f"{name}:{error.lineno}:{error.colno}: not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}",
            hint="The download may be incomplete; repeat it.",
        ) from None
    except ValueError as error:  # Python converts no more than 4300 digits
        raise InvalidConfig(f"{name}:1:1: {error}") from None
    except RecursionError:
        raise InvalidConfig(f"{name}:1:1: nested too deeply for a config.json") from None
    if not isinstance(config, dict):
        raise InvalidConfig(f"{name}:1:1: not a JSON object, but {type(config).__name__}")
    return config


def _require_sizes(value: object, name: str, key: str = "") -> None:
    """Raises InvalidConfig for an implausibly large number of anything."""
    if isinstance(value, dict):
        for inner, item in value.items():
            _require_sizes(item, name, inner)
    elif isinstance(value, list):
        for item in value:
            _require_sizes(item, name, key)
    elif isinstance(value, int):
        limit = _MOST_PARTS if _PARTS.search(key) else _MOST
        if abs(value) > limit:
            raise InvalidConfig(f'{name}: "{key}" is {value:,}; the limit is {limit:,}'[:400])


def cached_file(model_id: str, hub: Hub, name: str = CONFIG) -> Path | None:
    """Returns a model's file in the hub's own cache on this machine, or None."""
    candidates = _hf_cached(model_id, name) if hub is Hub.HF else _modelscope_cached(model_id, name)
    return next((path for path in candidates if path.is_file()), None)


def tokenizer_file(source: str, hub: Hub) -> Path | None:
    """Returns the tokenizer.json of a model, given as a folder or by its id on the hub; None if it is not here."""
    return file_here(source, hub, TOKENIZER)


def model_type(source: str, hub: Hub) -> str | None:
    """Returns the family in the config.json of a model, given likewise; None if it is not here or names none."""
    path = file_here(source, hub, CONFIG)
    family = parse_config(path.read_text(encoding="utf-8"), str(path)).get("model_type") if path else None
    return family if isinstance(family, str) else None


def file_here(source: str, hub: Hub, name: str) -> Path | None:
    inside = Path(source) / name
    return inside if inside.is_file() else cached_file(source, hub, name)


def _hf_cached(model_id: str, name: str) -> list[Path]:
    """Returns candidate paths: the commit of `main`, then all others, newest first."""
    model = _hf_folder("models", model_id)
    others = sorted((model / "snapshots").glob(f"*/{name}"), key=lambda path: path.stat().st_mtime, reverse=True)
    main = model / "refs" / "main"
    if main.is_file():
        return [model / "snapshots" / main.read_text(encoding="utf-8").strip() / name, *others]
    return others


def _hf_folder(kind: str, name: str) -> Path:
    return hf_hub_cache(os.environ) / f"{kind}--{name.replace('/', '--')}"


def _modelscope_cached(model_id: str, file: str) -> list[Path]:
    """Returns candidate paths of all ModelScope versions; dots in a name become `___`."""
    org, _, name = model_id.partition("/")
    given = _variable("MODELSCOPE_CACHE")
    roots = [Path(given).expanduser()] if given else []
    roots += [Path("~/.cache/modelscope/hub").expanduser()]
    folders = [root / part / org for root in roots for part in ("models", "hub/models", "")]
    names = dict.fromkeys((name, name.replace(".", "___")))
    return [folder / spelling / file for folder in folders for spelling in names]


def _variable(name: str) -> str | None:
    """Returns an environment variable, or None if it is unset or empty."""
    return os.environ.get(name, "").strip() or None


def _endpoint(hub: Hub) -> str:
    if hub is Hub.HF:
        return (_variable("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    return (_variable("MODELSCOPE_ENDPOINT") or "https://modelscope.cn").rstrip("/")


def _url(model_id: str, hub: Hub) -> str:
    if hub is Hub.HF:
        return f"{_endpoint(hub)}/{model_id}/resolve/main/config.json"
    return f"{_endpoint(hub)}/models/{model_id}/resolve/master/config.json"


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token goes to the original host only."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Returns the next request, without the token if it goes to another host."""
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and urllib.parse.urlsplit(newurl)[:2] != urllib.parse.urlsplit(req.full_url)[:2]:
            following.remove_header("Authorization")
        return following


def _download(url: str, hub: Hub, timeout_s: float) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "dstrain", "Accept": "application/json"})
    token = _hf_token() if hub is Hub.HF else None
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.build_opener(_Redirects).open(request, timeout=timeout_s) as answer:
        body: bytes = answer.read(MAX_BYTES)
    return body


def _hf_token() -> str | None:
    """Returns HF_TOKEN, or the token stored by `hf auth login`."""
    token = _variable("HF_TOKEN")
    if token is not None:
        return token
    stored = Path(_variable("HF_TOKEN_PATH") or hf_home(os.environ) / "token").expanduser()
    try:
        return stored.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def _refusal(error: urllib.error.HTTPError, model_id: str, hub: Hub) -> DstrainError:
    """Returns the error for an HTTP status.

    The Hugging Face hub answers 401 for gated and for unknown models, to hide private names; the header X-Error-Code,
    if it is sent, tells them apart.
    """
    endpoint, why = _endpoint(hub), error.headers.get("X-Error-Code", "")
    if why == "EntryNotFound":
        return InvalidConfig(
            f'"{model_id}" on {endpoint} has no config.json',
            hint="It may hold only an adapter or GGUF files; give its base model.",
        )
    if why == "RepoNotFound" or error.code == 404:
        return InvalidConfig(f'"{model_id}" is not a model on {endpoint}')
    if error.code in (401, 403):
        return EnvironmentProblem(
            f'"{model_id}" on {endpoint} is gated, private or misspelled: the hub answered {error.code}',
            hint=f"Request access at {endpoint}/{model_id}, then type `export HF_TOKEN=hf_…` (or `hf auth login`).",
        )
    return EnvironmentProblem(
        f"{error.url}: the hub answered {error.code} {error.reason}",
        hint=f"Try again later, give a local folder, or use `--hub {_OTHER[hub]}`.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFiles:
    """Facts about conversations from a tokenizer's files."""

    template: str | Mapping[str, str] | None
    """The text, or several by name; None if there is none."""
    special_tokens: Mapping[str, str]
    """Such as `bos_token`."""


def read_chat_files(source: str, hub: Hub) -> ChatFiles:
    """Returns the template and the special tokens of a model, given as a folder or by its id, as far as they are here.

    Source: transformers 5.23 tokenization_utils_base.py: _from_pretrained; the file of the template comes first.
    """
    config, tokens = (
        _read(file_here(source, hub, name)) for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    path = file_here(source, hub, "chat_template.jinja")
    template = path.read_text(encoding="utf-8") if path is not None else config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    given = {name: value for name, value in {**tokens, **config}.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
    return ChatFiles(
        template=template or None,
        special_tokens={name: text for name, text in texts.items() if isinstance(text, str)},
    )


def _read(path: Path | None) -> dict[str, Any]:
    """Returns a JSON object; an empty one if a file is not here or none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
