"""Notices to people: the message formats of chat services, and a sender in a thread that never stops training."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, quote_plus, unquote, urlsplit

from dstrain.errors import EnvironmentProblem, type_and_line
from dstrain.job.monitor import NotifyService

TIMEOUT_S = 10.0
"""For a service to answer."""
QUIET_S = 600.0
"""Seconds between two notices of one rule."""
MOST_BYTES = 2000
"""Bytes of a text; WeCom takes 2,048. Source: developer.work.weixin.qq.com/document/path/91770"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A message about a run."""

    event: str
    """`start`, `trouble`, `failure`, `end` or `test`."""
    title: str
    """One line: the run, and what happened."""
    text: str = ""
    rule: str | None = None
    """The rule of health, if it is about one; such notices are rate-limited."""

    @property
    def words(self) -> str:
        """Title and text, cut to what every service takes."""
        whole = f"{self.title}\n{self.text}".strip().encode()
        return whole.decode() if len(whole) <= MOST_BYTES else f"{whole[: MOST_BYTES - 4].decode(errors='ignore')} …"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where notices go. Its address and its secret come from the environment and are in no message."""

    service: NotifyService
    url: str = field(repr=False)
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """One HTTP request with a JSON body."""

    url: str = field(repr=False)
    body: Mapping[str, Any]


def _feishu(target: Target, notice: Notice, now: float) -> Post:
    """Returns Feishu's format; the signature's key is `TIMESTAMP\\nSECRET` and its message is empty.

    Source: open.feishu.cn/document/client-docs/bot-v3/add-custom-bot
    """
    body: dict[str, Any] = {"msg_type": "text", "content": {"text": notice.words}}
    if target.secret is None:
        return Post(url=target.url, body=body)
    stamp = str(round(now))
    return Post(url=target.url, body={"timestamp": stamp, "sign": _signed(f"{stamp}\n{target.secret}", ""), **body})


def _dingtalk(target: Target, notice: Notice, now: float) -> Post:
    """Returns DingTalk's format; the signature of `TIMESTAMP\\nSECRET`, in milliseconds, goes into the address.

    Source: open.dingtalk.com/document/robots/customize-robot-security-settings
    """
    body = {"msgtype": "text", "text": {"content": notice.words}}
    if target.secret is None:
        return Post(url=target.url, body=body)
    stamp = str(round(1000 * now))
    sign = quote_plus(_signed(target.secret, f"{stamp}\n{target.secret}"))
    return Post(url=f"{target.url}&timestamp={stamp}&sign={sign}", body=body)


def _wecom(target: Target, notice: Notice, now: float) -> Post:
    """Returns WeCom's format. Source: developer.work.weixin.qq.com/document/path/91770"""
    return Post(url=target.url, body={"msgtype": "text", "text": {"content": notice.words}})


def _slack(target: Target, notice: Notice, now: float) -> Post:
    """Returns Slack's format. Source: docs.slack.dev/messaging/sending-messages-using-incoming-webhooks"""
    escaped = notice.words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Post(url=target.url, body={"text": escaped})


def _webhook(target: Target, notice: Notice, now: float) -> Post:
    """Returns dstrain's own format."""
    body = {"event": notice.event, "title": notice.title, "text": notice.text, "rule": notice.rule, "time_s": now}
    return Post(url=target.url, body=body)


def _signed(key: str, message: str) -> str:
    return base64.b64encode(hmac.new(key.encode(), message.encode(), hashlib.sha256).digest()).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One kind of target."""

    variable: str
    """Environment variable of the address."""
    secret: str | None = None
    """Environment variable of the secret that signs messages, which may be missing."""
    post: Callable[[Target, Notice, float], Post] | None = None
    """Makes the request of a notice; None for mail."""
    code: str | None = None
    """Key of the answer that is 0 if the message was taken; the status is 200 if it was not, too."""


SERVICES: Mapping[NotifyService, Service] = MappingProxyType(
    {
        NotifyService.FEISHU: Service(variable="FEISHU_WEBHOOK", secret="FEISHU_SECRET", post=_feishu, code="code"),
        NotifyService.DINGTALK: Service(
            variable="DINGTALK_WEBHOOK", secret="DINGTALK_SECRET", post=_dingtalk, code="errcode"
        ),
        NotifyService.WECOM: Service(variable="WECOM_WEBHOOK", post=_wecom, code="errcode"),
        NotifyService.SLACK: Service(variable="SLACK_WEBHOOK", post=_slack),
        NotifyService.WEBHOOK: Service(variable="NOTIFY_WEBHOOK", post=_webhook),
        NotifyService.MAIL: Service(variable="NOTIFY_SMTP_URL"),
    }
)
"""Each service with the environment variables of its address and its secret."""

VARIABLES = frozenset(name for service in SERVICES.values() for name in (service.variable, service.secret) if name)
"""All of these variables, which ranks do not get."""
_SCHEMES = {NotifyService.MAIL: ("smtp", "smtps")}


def targets(services: Sequence[NotifyService], environment: Mapping[str, str]) -> list[Target]:
    """Returns where notices go. Raises EnvironmentProblem if an address is missing or is none."""
    found = []
    for name in dict.fromkeys(services):
        service, schemes = SERVICES[name], _SCHEMES.get(name, ("https", "http"))
        example = f"export {service.variable}={schemes[0]}://…"
        url = environment.get(service.variable, "").strip()
        if not url:
            raise EnvironmentProblem(f"notices to {name}: {service.variable} is not set", hint=f"Type {example}")
        if not url.startswith(tuple(f"{scheme}://" for scheme in schemes)):
            raise EnvironmentProblem(f"notices to {name}: {service.variable} is no address", hint=f"Type {example}")
        secret = environment.get(service.secret, "").strip() if service.secret else ""
        found.append(Target(service=name, url=url, secret=secret or None))
    return found


def send(target: Target, notice: Notice) -> None:
    """Sends one notice. Raises OSError, or ValueError if the service refuses it; no message has the address."""
    post = SERVICES[target.service].post
    if post is None:
        _mail(target, notice)
        return
    made = post(target, notice, time.time())
    head = {"Content-Type": "application/json; charset=utf-8"}
    request = urllib.request.Request(made.url, data=json.dumps(made.body).encode(), headers=head)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            text = answer.read(65536).decode(errors="replace")
    except urllib.error.HTTPError as error:
        error.close()
        raise ValueError(f"HTTP {error.code}") from None
    _require_taken(SERVICES[target.service], text)


def _require_taken(service: Service, text: str) -> None:
    """Raises ValueError if a service that answers 200 did not take the message."""
    if service.code is None:
        return
    try:
        answer = json.loads(text)
        code = answer[service.code]
    except (ValueError, KeyError, TypeError):
        raise ValueError("its answer is not that of the service") from None
    if code != 0:
        raise ValueError(f"{service.code} {code}: {answer.get('msg') or answer.get('errmsg') or 'refused'}"[:200])


def _mail(target: Target, notice: Notice) -> None:
    """Sends a mail through `smtp[s]://USER:PASSWORD@HOST:PORT?from=…&to=…,…`; smtp uses STARTTLS if the server can."""
    import smtplib  # with the parsers of mail, which nothing else needs
    from email.message import EmailMessage

    url = urlsplit(target.url)
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    if "to" not in query or not url.hostname:
        raise ValueError(f"{SERVICES[target.service].variable} has no host or no to=")
    message = EmailMessage()
    message["Subject"], message["To"] = notice.title, query["to"]
    message["From"] = query.get("from") or unquote(url.username or "") or query["to"]
    message.set_content(notice.text or notice.title)
    kind = smtplib.SMTP_SSL if url.scheme == "smtps" else smtplib.SMTP
    with kind(url.hostname, url.port or 0, timeout=TIMEOUT_S) as server:
        server.ehlo()
        if url.scheme == "smtp" and server.has_extn("starttls"):
            server.starttls()
        if url.username:
            server.login(unquote(url.username), unquote(url.password or ""))
        server.send_message(message)


class Notifier:
    """Sends notices in a thread; a failure is said once for each service."""

    def __init__(self, receivers: Sequence[Target], say: Callable[[str], None], clock: Callable[[], float]) -> None:
        """`say` prints a message of dstrain."""
        self._receivers = receivers
        self._say = say
        self._clock = clock
        self._sent: dict[str, float] = {}
        self._failed: set[NotifyService] = set()
        self._waiting: queue.Queue[Notice | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="notices", daemon=True)
        if receivers:
            self._thread.start()

    @property
    def is_silent(self) -> bool:
        """Whether nobody receives notices."""
        return not self._receivers

    def send(self, notice: Notice) -> None:
        """Queues a notice; one of a rule that had one in the last ten minutes is dropped."""
        now = self._clock()
        if notice.rule is not None:
            if now - self._sent.get(notice.rule, -QUIET_S) < QUIET_S:
                return
            self._sent[notice.rule] = now
        if self._receivers:
            self._waiting.put(notice)

    def close(self) -> None:
        """Waits until everything is sent, for as long as one service may take."""
        if self._receivers:
            self._waiting.put(None)
            self._thread.join(TIMEOUT_S + 1)

    def _work(self) -> None:
        while (notice := self._waiting.get()) is not None:
            for target in self._receivers:
                try:
                    send(target, notice)
                except Exception as error:
                    self._tell(target, error)

    def _tell(self, target: Target, error: Exception) -> None:
        if target.service in self._failed:
            return
        self._failed.add(target.service)
        self._say(f"notices: {target.service}: not sent ({reason(error, target)}); training continues")


def reason(error: Exception, target: Target) -> str:
    """Returns why a notice was not sent, without the target's address and secret."""
    text = type_and_line(error)
    for private in filter(None, (target.url, target.secret)):
        text = text.replace(private, "…")
    return text
