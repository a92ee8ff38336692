"""Recognizes environment variables that hold secrets."""

from __future__ import annotations

import re

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
