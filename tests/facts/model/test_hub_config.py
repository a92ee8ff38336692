"""Hubs: a config.json from a cache on disk, from a real server on 127.0.0.1, and every way in which that can fail."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cases import TINY_CONFIG as CONFIG

from dstrain.choices import Hub
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.model.hub_config import cached_file, fetch_config, is_hub_id, is_reached, parse_config
from dstrain.facts.probe import read_model

pytestmark = pytest.mark.commands


@dataclass
class Answer:
    """What the server says to one path."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


@dataclass
class Server:
    """A hub on 127.0.0.1."""

    endpoint: str
    answers: dict[str, Answer]
    requests: list[tuple[str, str | None]]
    """Path and Authorization of every request."""


def serve() -> Iterator[Server]:
    answers: dict[str, Answer] = {}
    requests: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append((self.path, self.headers.get("Authorization")))
            answer = answers.get(self.path, Answer(status=404))
            time.sleep(answer.delay_s)
            self.send_response(answer.status)
            for key, value in answer.headers.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Server(endpoint=f"http://127.0.0.1:{server.server_port}", answers=answers, requests=requests)
        server.shutdown()
        thread.join()


@pytest.fixture
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home without settings, so that no cache and no token of this machine takes part."""
    for name in (
        *("HF_HUB_CACHE", "HF_HOME", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *("HF_ENDPOINT", "XDG_CACHE_HOME", "MODELSCOPE_CACHE", "MODELSCOPE_ENDPOINT", "http_proxy", "HTTP_PROXY"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def hub(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that both hubs' endpoints point to."""
    for server in serve():
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint + "/")
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.endpoint)
        yield server


@pytest.fixture
def other_server() -> Iterator[Server]:
    """A second server, on another port."""
    yield from serve()


PATH = "/org/model/resolve/main/config.json"


def test_a_config_is_fetched_and_nothing_else(hub: Server) -> None:
    hub.answers[PATH] = Answer(body=json.dumps(CONFIG).encode())
    assert fetch_config("org/model", Hub.HF) == CONFIG
    assert hub.requests == [(PATH, None)]


def test_modelscope_is_asked_at_its_own_address(hub: Server) -> None:
    hub.answers["/models/org/model/resolve/master/config.json"] = Answer(body=json.dumps(CONFIG).encode())
    assert fetch_config("org/model", Hub.MODELSCOPE) == CONFIG


def test_the_stored_token_is_sent(hub: Server, own_home: Path) -> None:
    token = own_home / ".cache" / "huggingface" / "token"
    token.parent.mkdir(parents=True)
    token.write_text("hf_stored\n")
    hub.answers[PATH] = Answer(body=b"{}")
    fetch_config("org/model", Hub.HF)
    assert hub.requests == [(PATH, "Bearer hf_stored")]


def test_the_token_follows_a_redirect_on_the_same_host_alone(
    hub: Server, other_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.answers[PATH] = Answer(status=307, headers={"Location": "/new/name"})
    hub.answers["/new/name"] = Answer(body=b"{}")
    fetch_config("org/model", Hub.HF)
    assert hub.requests == [(PATH, "Bearer hf_secret"), ("/new/name", "Bearer hf_secret")]
    hub.answers[PATH] = Answer(status=302, headers={"Location": f"{other_server.endpoint}/file"})
    other_server.answers["/file"] = Answer(body=b"{}")
    fetch_config("org/model", Hub.HF)
    assert other_server.requests == [("/file", None)]


def test_an_unknown_model_gets_the_nearest_name(hub: Server) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_model("Qwen/Qwen3-8Bx")
    assert caught.value.problem == f'"Qwen/Qwen3-8Bx" is not a model on {hub.endpoint}'
    assert caught.value.hint is not None
    assert caught.value.hint.startswith('Did you mean "')


@pytest.mark.parametrize(
    ("status", "code", "error", "said"),
    [
        (404, "EntryNotFound", InvalidConfig, r"has no config\.json"),
        (401, "RepoNotFound", InvalidConfig, '"org/model" is not a model on'),
        (401, "GatedRepo", EnvironmentProblem, "gated, private or misspelled: the hub answered 401"),
        (403, "GatedRepo", EnvironmentProblem, "gated, private or misspelled: the hub answered 403"),
        (503, "", EnvironmentProblem, "the hub answered 503"),
    ],
)
def test_what_a_hub_refuses_is_told(hub: Server, status: int, code: str, error: type[Exception], said: str) -> None:
    hub.answers[PATH] = Answer(status=status, headers={"X-Error-Code": code} if code else {})
    with pytest.raises(error, match=said) as caught:
        fetch_config("org/model", Hub.HF)
    if code == "GatedRepo":
        hint = str(getattr(caught.value, "hint", None))
        assert (f"{hub.endpoint}/org/model" in hint, "export HF_TOKEN=" in hint) == (True, True)


@pytest.mark.parametrize("body", [b"<html>Please log in</html>", b"", b"[1]", b"\xff\xfe", b'{"model_type": '])
def test_an_answer_that_is_no_config_is_shown(hub: Server, body: bytes) -> None:
    hub.answers[PATH] = Answer(body=body)
    with pytest.raises(EnvironmentProblem, match=r"the response is not a config\.json") as caught:
        fetch_config("org/model", Hub.HF)
    assert repr(body[:60]) in caught.value.problem


def test_a_hub_that_does_not_listen_is_unreachable(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(EnvironmentProblem, match=r"connection failed: .*refused") as caught:
            fetch_config("org/model", Hub.HF)
    assert caught.value.hint == "Give a local folder, set HF_ENDPOINT to a mirror, or use `--hub modelscope`."


def test_a_hub_that_does_not_answer_is_given_up(hub: Server) -> None:
    hub.answers[PATH] = Answer(body=b"{}", delay_s=1.0)
    with pytest.raises(EnvironmentProblem, match="connection failed: timed out"):
        fetch_config("org/model", Hub.HF, timeout_s=0.1)


@pytest.mark.parametrize("endpoint", ["huggingface.co", "nonsense://x", "http://"])
def test_an_endpoint_that_is_no_address_is_unreachable(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(EnvironmentProblem, match="connection failed"):
        fetch_config("org/model", Hub.HF)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_asks_nobody(hub: Server, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(EnvironmentProblem, match="HF_HUB_OFFLINE is set") as caught:
        fetch_config("org/model", Hub.HF)
    assert hub.requests == []
    assert caught.value.hint is not None
    assert "`hf download org/model config.json`" in caught.value.hint


def write_config(folder: Path, layers: int = 2) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))


def test_the_cache_comes_before_the_hub_even_offline(
    hub: Server, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = own_home / ".cache/huggingface/hub/models--org--model"
    write_config(model / "snapshots" / "abc", layers=3)
    assert fetch_config("org/model", Hub.HF)["num_hidden_layers"] == 3
    assert hub.requests == []


def test_a_hub_that_is_not_reached_is_told_from_the_cache(
    own_home: Path, hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_reached(str(own_home), Hub.HF)  # a folder
    write_config(own_home / ".cache/huggingface/hub/models--org--model" / "snapshots" / "abc")
    assert is_reached("org/model", Hub.HF)  # the hub answers 404
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert not is_reached("org/model", Hub.HF)
    with pytest.raises(EnvironmentProblem, match="connection failed"):
        is_reached("org/other", Hub.HF)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert is_reached("org/model", Hub.HF)


def test_of_cached_commits_the_one_that_main_names_counts(own_home: Path) -> None:
    model = own_home / ".cache/huggingface/hub/models--org--model"
    write_config(model / "snapshots" / "aaa", layers=3)
    write_config(model / "snapshots" / "bbb", layers=4)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("aaa")
    assert fetch_config("org/model", Hub.HF)["num_hidden_layers"] == 3


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_the_cache_may_be_moved(own_home: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, str(own_home / "elsewhere"))
    hub_folder = own_home / "elsewhere" / ("hub" if variable == "HF_HOME" else "")
    write_config(hub_folder / "models--org--model" / "snapshots" / "abc")
    assert cached_file("org/model", Hub.HF) is not None


@pytest.mark.parametrize("folder", ["models/org/model___1", "models/org/model.1", "org/model.1"])
def test_modelscopes_cache_is_found_in_every_layout(own_home: Path, folder: str) -> None:
    write_config(own_home / ".cache/modelscope/hub" / folder)
    assert fetch_config("org/model.1", Hub.MODELSCOPE) == CONFIG


def test_a_broken_file_in_the_cache_is_named(own_home: Path) -> None:
    write_config(own_home / ".cache/huggingface/hub/models--org--model/snapshots/abc")
    file = next(own_home.rglob("config.json"))
    file.write_text("{\n  broken")
    with pytest.raises(InvalidConfig, match=f"{file}:2:3: not valid JSON"):
        fetch_config("org/model", Hub.HF)


def test_an_id_is_two_names_and_a_slash() -> None:
    assert all(map(is_hub_id, ["Qwen/Qwen3-8B", "a/b", "01-ai/Yi_1.5"]))
    assert not any(map(is_hub_id, ["qwen", "a/b/c", "../b", "a/..", "a/b?x=1", "a b/c", "/a/b", "a/"]))


@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", r"config\.json:1:1: not a JSON object, but list"), ("[" * 100_000, "nested too deep")],
    ids=["list", "deep"],
)
def test_a_config_is_an_object(text: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        parse_config(text, "config.json")
