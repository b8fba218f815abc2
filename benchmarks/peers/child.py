"""A driver process that the runner talks to, and stops while it is another one's turn.

The process leads a group of its own, so that stopping it stops what it started too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xspec.errors import XspecError

CLOSE_TIMEOUT_S = 20.0
LOG_TAIL_BYTES = 2000


class PeerError(XspecError):
    """A driver did not start, answered with an error, or ended early."""


class Child:
    """One driver. Its stderr goes to `log`."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        self._buffer = b""
        with log.open("wb") as errors:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=dict(environ),
                    bufsize=0,
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerError(f"{name}: {command[0]} cannot be started: {error}") from error

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply to one message. PeerError if it tells of an error, or if none comes in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._ended() from error
        reply: dict[str, Any] = json.loads(self._read_line(timeout_s))
        if "error" in reply:
            raise PeerError(f"{self.name}: {reply['error']} (log: {self._log})")
        return reply

    def pause(self) -> None:
        """Stop every process of the group: none of them uses the CPU until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the driver: its input ends, and what has not ended by itself then is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self.resume()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(self._process.pid, number)

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select(
                [self._process.stdout], [], [], max(0.0, deadline_s - time.monotonic())
            )
            if not ready:
                raise PeerError(f"{self.name}: no answer within {timeout_s:g} s (log: {self._log})")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._ended()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self) -> PeerError:
        tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return PeerError(f"{self.name}: the driver ended early; {self._log} ends:\n{tail}")
