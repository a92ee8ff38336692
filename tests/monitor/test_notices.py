"""Notices: the documented formats and signatures of each service, against a receiver on this machine."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import smtplib
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dstrain.errors import EnvironmentProblem
from dstrain.job.monitor import NotifyService
from dstrain.monitor.notices import (
    MOST_BYTES,
    SERVICES,
    VARIABLES,
    Notice,
    Notifier,
    Target,
    reason,
    send,
    targets,
)

NOTICE = Notice(
    event="trouble",
    title="dstrain: output on gpu1: health rule loss_spike",
    text="step 7: <b> & more",
    rule="loss_spike",
)
SECRET = "SEC-of-a-test"


@dataclass
class Receiver:
    """An HTTP server that keeps what it gets."""

    url: str = ""
    status: int = 200
    answer: str = '{"code": 0, "errcode": 0}'
    delay_s: float = 0.0
    got: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    kept = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Content-Type"].startswith("application/json")
            kept.got.append((self.path, body))
            time.sleep(kept.delay_s)
            self.send_response(kept.status)
            self.end_headers()
            self.wfile.write(kept.answer.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    kept.url = f"http://127.0.0.1:{server.server_port}/hook/private-word?access_token=private-token"
    yield kept
    server.shutdown()
    server.server_close()


def target(service: NotifyService, receiver: Receiver, secret: str | None = None) -> Target:
    return Target(service=service, url=receiver.url, secret=secret)


TEXT = f"{NOTICE.title}\n{NOTICE.text}"


@pytest.mark.parametrize(
    ("service", "body"),
    [
        (NotifyService.FEISHU, {"msg_type": "text", "content": {"text": TEXT}}),
        (NotifyService.DINGTALK, {"msgtype": "text", "text": {"content": TEXT}}),
        (NotifyService.WECOM, {"msgtype": "text", "text": {"content": TEXT}}),
        (NotifyService.SLACK, {"text": f"{NOTICE.title}\nstep 7: &lt;b&gt; &amp; more"}),
    ],
)
def test_the_body_is_the_documented_one(receiver: Receiver, service: NotifyService, body: dict[str, Any]) -> None:
    send(target(service, receiver), NOTICE)
    assert receiver.got == [("/hook/private-word?access_token=private-token", body)]


def test_any_webhook_gets_the_parts(receiver: Receiver) -> None:
    send(target(NotifyService.WEBHOOK, receiver), NOTICE)
    (_, body), *_ = receiver.got
    assert abs(body.pop("time_s") - time.time()) < 60
    assert body == {"event": "trouble", "title": NOTICE.title, "text": NOTICE.text, "rule": "loss_spike"}


def test_feishu_gets_a_signature_in_the_body_whose_key_is_time_and_secret(receiver: Receiver) -> None:
    send(target(NotifyService.FEISHU, receiver, SECRET), NOTICE)
    (path, body), *_ = receiver.got
    assert path.endswith("private-token")
    assert abs(int(body["timestamp"]) - time.time()) < 60
    key = f"{body['timestamp']}\n{SECRET}".encode()
    assert body["sign"] == base64.b64encode(hmac.new(key, b"", hashlib.sha256).digest()).decode()


def test_dingtalk_gets_a_signature_of_milliseconds_in_the_address(receiver: Receiver) -> None:
    send(target(NotifyService.DINGTALK, receiver, SECRET), NOTICE)
    (path, body), *_ = receiver.got
    query = {name: values[0] for name, values in parse_qs(urlsplit(path).query, strict_parsing=True).items()}
    assert query["access_token"] == "private-token"
    assert abs(int(query["timestamp"]) / 1000 - time.time()) < 60
    message = f"{query['timestamp']}\n{SECRET}".encode()
    assert query["sign"] == base64.b64encode(hmac.new(SECRET.encode(), message, hashlib.sha256).digest()).decode()
    assert "sign" not in body


@pytest.mark.parametrize(
    ("service", "status", "answer", "said"),
    [
        (NotifyService.FEISHU, 200, '{"code": 19021, "msg": "sign match fail"}', "code 19021: sign match fail"),
        (
            NotifyService.DINGTALK,
            200,
            '{"errcode": 310000, "errmsg": "keywords not in content"}',
            "errcode 310000: keywords",
        ),
        (NotifyService.WECOM, 200, "<html>", "its answer is not that of the service"),
        (NotifyService.SLACK, 403, "invalid_token", "HTTP 403"),
        (NotifyService.WEBHOOK, 500, "", "HTTP 500"),
    ],
)
def test_a_refusal_is_an_error_without_the_address(
    receiver: Receiver, service: NotifyService, status: int, answer: str, said: str
) -> None:
    receiver.status, receiver.answer = status, answer
    one = target(service, receiver, SECRET)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        send(one, NOTICE)
    assert "private" not in reason(caught.value, one)


def test_the_reason_hides_address_and_secret_wherever_they_stand(receiver: Receiver) -> None:
    one = target(NotifyService.FEISHU, receiver, SECRET)
    assert reason(OSError(f"no way to {receiver.url} with {SECRET}"), one) == "OSError: no way to … with …"
    assert "private" not in repr(one)
    assert SECRET not in repr(one)


def test_a_long_text_is_cut_between_characters() -> None:
    words = Notice(event="end", title="题" * 500, text="文" * 5000).words
    assert len(words.encode()) <= MOST_BYTES
    assert words.endswith("文 …")


def notifier(receiver: Receiver, said: list[str], times: list[float]) -> Notifier:
    return Notifier([target(NotifyService.WECOM, receiver)], said.append, lambda: times.pop(0))


def test_a_rule_is_told_once_in_ten_minutes_and_other_notices_always(receiver: Receiver) -> None:
    said: list[str] = []
    sender = notifier(receiver, said, [0.0, 599.0, 599.5, 599.6, 600.0])
    for notice in (NOTICE, NOTICE, Notice(event="end", title="a"), Notice(event="end", title="a"), NOTICE):
        sender.send(notice)
    sender.close()
    assert [body["text"]["content"] for _, body in receiver.got] == [TEXT, "a", "a", TEXT]
    assert said == []


def test_a_failure_is_one_line_and_later_notices_are_tried(receiver: Receiver) -> None:
    said: list[str] = []
    receiver.status = 500
    sender = notifier(receiver, said, [0.0, 1.0])
    sender.send(Notice(event="start", title="a"))
    sender.send(Notice(event="end", title="b"))
    sender.close()
    assert said == ["notices: wecom: not sent (ValueError: HTTP 500); training continues"]
    assert len(receiver.got) == 2


def test_a_slow_service_holds_up_nobody(receiver: Receiver) -> None:
    receiver.delay_s = 1.0
    sender = notifier(receiver, [], [0.0])
    began = time.monotonic()
    sender.send(NOTICE)
    assert time.monotonic() - began < 0.5
    sender.close()
    assert len(receiver.got) == 1


@pytest.mark.parametrize("service", list(NotifyService))
def test_an_address_that_is_missing_or_none_is_named_by_its_variable(service: NotifyService) -> None:
    variable = SERVICES[service].variable
    with pytest.raises(EnvironmentProblem, match=f"{variable} is not set"):
        targets([service], {})
    with pytest.raises(EnvironmentProblem, match=f"{variable} is no address") as caught:
        targets([service], {variable: "file:///etc/private"})
    assert "private" not in str(caught.value)
    assert variable in VARIABLES


class _Mailbox(socketserver.StreamRequestHandler):
    """Takes one mail by SMTP."""

    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        while line := self.rfile.readline().strip():
            if line.upper().startswith(b"EHLO"):
                self.wfile.write(b"250-here\r\n250 AUTH PLAIN\r\n")
            elif line.upper().startswith(b"AUTH"):
                mails.append(base64.b64decode(line.split()[-1]).decode())
                self.wfile.write(b"235 ok\r\n")
            elif line.upper() == b"DATA":
                self.wfile.write(b"354 go\r\n")
                lines = []
                while (text := self.rfile.readline()) != b".\r\n":
                    lines.append(text.decode())
                mails.append("".join(lines))
                self.wfile.write(b"250 ok\r\n")
            else:
                self.wfile.write(b"221 bye\r\n" if line.upper() == b"QUIT" else b"250 ok\r\n")


mails: list[str] = []


def test_a_mail_has_the_title_as_its_subject() -> None:
    mails.clear()
    with socketserver.TCPServer(("127.0.0.1", 0), _Mailbox) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"smtp://me%40here:pass%2Fword@127.0.0.1:{server.server_address[1]}?to=a@there,b@there"
        send(Target(service=NotifyService.MAIL, url=url), NOTICE)
    login, mail = mails
    assert login == "\0me@here\0pass/word"
    assert f"Subject: {NOTICE.title}" in mail.replace("\r\n ", " ")
    assert "To: a@there,b@there" in mail
    assert "From: me@here" in mail
    assert NOTICE.text in mail


def test_a_mail_without_a_receiver_is_refused() -> None:
    with pytest.raises(ValueError, match="no host or no to="):
        send(Target(service=NotifyService.MAIL, url="smtp://127.0.0.1:1"), NOTICE)
    assert issubclass(smtplib.SMTPException, OSError)
