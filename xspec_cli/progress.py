"""Progress for people: a bar with time left on a terminal, plain log lines anywhere else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TextIO

from xspec.progress import Progress, duration

BAR_CELLS = 24
REDRAW_INTERVAL_S = 0.1
LOG_INTERVAL_S = 5.0

log = logging.getLogger(__name__)


class TerminalProgress:
    """One line that redraws itself. Log lines pass through `BarHandler`, which clears it first."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._stage = ""
        self._began_s = 0.0
        self._began_at = 0
        self._drawn_s = 0.0
        self._open = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            now = self._clock()
            if stage != self._stage:
                self._end()
                self._stage, self._began_s, self._drawn_s = stage, now, float("-inf")
                self._began_at = done
            ended = 0 < total <= done
            if not ended and now - self._drawn_s < REDRAW_INTERVAL_S:
                return
            self._drawn_s = now
            line = render_bar(stage, done, total, now - self._began_s, self._began_at)
            self._stream.write(f"\r{line}\x1b[K")
            self._open = True
            if ended:
                self._end()
                self._stage = ""
            self._stream.flush()

    def clear(self) -> None:
        """Take the bar off the screen so that another line can be written."""
        with self._lock:
            if self._open:
                self._stream.write("\r\x1b[K")
                self._open = False

    def _end(self) -> None:
        if self._open:
            self._stream.write("\n")
            self._open = False


def render_bar(stage: str, done: int, total: int, elapsed_s: float, began_at: int = 0) -> str:
    """One line of text; without a total only a count. `began_at`: what was done before the clock started."""
    if total <= 0:
        return f"{stage}: {done}"
    done = min(max(done, 0), total)
    filled = BAR_CELLS * done // total
    bar = "#" * filled + "." * (BAR_CELLS - filled)
    if done == total:
        tail = f"done in {duration(elapsed_s)}"
    else:
        tail = time_left(done - began_at, total - done, elapsed_s)
    return f"{stage} [{bar}] {100 * done // total:3d}% {counted(done, total)} {tail}".rstrip()


def time_left(done: int, left: int, elapsed_s: float) -> str:
    """At the pace so far; empty while there is none."""
    return f"{duration(elapsed_s * left / done)} left" if done > 0 else ""


def counted(done: int, total: int) -> str:
    """done/total, scaled to millions where the numbers are bytes or weights rather than steps."""
    if total < 100_000:
        return f"{done}/{total}"
    return f"{done / 1e6:.1f}M/{total / 1e6:.1f}M"


class LogProgress:
    """A log line when a stage begins and ends, and every few seconds in between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stage = ""
        self._began_s = 0.0
        self._began_at = 0
        self._logged_s = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            now = self._clock()
            fresh = stage != self._stage
            if fresh:
                self._stage, self._began_s, self._began_at = stage, now, done
            ended = 0 < total <= done
            if not (fresh or ended or now - self._logged_s >= LOG_INTERVAL_S):
                return
            self._logged_s = now
            if ended:
                self._stage = ""
                log.info("%s: done, %s in %s", stage, counted(done, total), duration(now - self._began_s))
            elif total > 0:
                left = time_left(done - self._began_at, total - done, now - self._began_s)
                text = f"{100 * done // total}%, {counted(done, total)}"
                log.info("%s: %s", stage, f"{text}, {left}" if left else text)
            else:
                log.info("%s", stage if fresh and not done else f"{stage}: {done}")


class BarHandler(logging.StreamHandler[TextIO]):
    """A log handler that shares its stream with a bar."""

    def __init__(self, stream: TextIO, bar: TerminalProgress) -> None:
        super().__init__(stream)
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        self._bar.clear()
        super().emit(record)


def set_up_output(level: str, stream: TextIO) -> Progress:
    """Send log lines to `stream` as plain text and return the progress that suits it."""
    terminal = stream.isatty()
    bar = TerminalProgress(stream)
    handler: logging.Handler = BarHandler(stream, bar) if terminal else logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return bar if terminal else LogProgress()
