"""Explains the exit codes of ranks and of the launcher."""

from __future__ import annotations

import signal
from types import MappingProxyType

_OF_SIGNALS = MappingProxyType(
    {
        signal.SIGKILL: "killed",
        signal.SIGSEGV: "segmentation fault in native code",
        signal.SIGBUS: "bus error, usually because /dev/shm is too small",
        signal.SIGABRT: "aborted by native code, often NCCL's watchdog or a failed assertion",
        signal.SIGILL: "illegal instruction: a library was built for another processor",
        signal.SIGFPE: "arithmetic fault in native code",
        signal.SIGTERM: "terminated from outside",
        signal.SIGINT: "stopped by Ctrl-C",
        signal.SIGHUP: "stopped because the terminal was closed",
        signal.SIGPIPE: "the reader of its output closed the pipe",
    }
)

_OF_CODES = MappingProxyType(
    {
        0: "ended well",
        1: "ended with an error",
        2: "wrong command line",
        126: "the interpreter cannot be executed",
        127: "the interpreter was not found",
        255: "ssh could not reach a node",
    }
)


def signal_of(code: int) -> signal.Signals | None:
    """Returns the signal that an exit code stands for, or None.

    A signal N is -N to Python, 256-N after the launcher's `sys.exit(-N)`, and 128+N to a shell.

    >>> signal_of(-9), signal_of(247), signal_of(137), signal_of(1)
    (<Signals.SIGKILL: 9>, <Signals.SIGKILL: 9>, <Signals.SIGKILL: 9>, None)
    """
    number = -code if code < 0 else 256 - code if 256 - 32 < code < 255 else code - 128 if 128 < code <= 128 + 31 else 0
    known = {member.value for member in signal.Signals}
    return signal.Signals(number) if number in known else None


def decode(code: int) -> str:
    """Returns the meaning of an exit code, in words.

    >>> decode(247)
    'code 247 (SIGKILL): killed'
    >>> decode(1)
    'code 1: ended with an error'
    """
    number = signal_of(code)
    if number is not None:
        return f"code {code} ({number.name}): {_OF_SIGNALS.get(number, 'ended by a signal')}"
    return f"code {code}: {_OF_CODES.get(code, 'ended with an error')}"
