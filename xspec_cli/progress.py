"""Progress for people: a bar with time left on a terminal, plain log lines anywhere else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TextIO

from xspec.progress import Progress

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
        self._drawn_s = 0.0
        self._open = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            now = self._clock()
            if stage != self._stage:
                self._end()
                self._stage, self._began_s, self._drawn_s = stage, now, float("-inf")
            ended = 0 < total <= done
            if not ended and now - self._drawn_s < REDRAW_INTERVAL_S:
                return
            self._drawn_s = now
            self._stream.write("\r" + render_bar(stage, done, total, now - self._began_s) + "\x1b[K")
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


def render_bar(stage: str, done: int, total: int, elapsed_s: float) -> str:
    """One line of text; without a total only a count."""
    if total <= 0:
        return f"{stage}: {done}"
    done = min(max(done, 0), total)
    filled = BAR_CELLS * done // total
    bar = "#" * filled + "." * (BAR_CELLS - filled)
    if done == total:
        tail = f"done in {duration(elapsed_s)}"
    elif done == 0:
        tail = ""
    else:
        tail = f"{duration(elapsed_s * (total - done) / done)} left"
    return f"{stage} [{bar}] {100 * done // total:3d}% {counted(done, total)} {tail}".rstrip()


def counted(done: int, total: int) -> str:
    """done/total, scaled to millions where the numbers are bytes or weights rather than steps."""
    if total < 100_000:
        return f"{done}/{total}"
    return f"{done / 1e6:.1f}M/{total / 1e6:.1f}M"


def duration(seconds: float) -> str:
    """3.2 s, 1 min 5 s, 2 h 3 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class LogProgress:
    """A log line when a stage begins and ends, and every few seconds in between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stage = ""
        self._began_s = 0.0
        self._logged_s = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            now = self._clock()
            fresh = stage != self._stage
            if fresh:
                self._stage, self._began_s = stage, now
            ended = 0 < total <= done
            if not (fresh or ended or now - self._logged_s >= LOG_INTERVAL_S):
                return
            self._logged_s = now
            if ended:
                self._stage = ""
                log.info("%s: done, %s in %s", stage, counted(done, total), duration(now - self._began_s))
            elif total > 0:
                log.info("%s: %d%%, %s", stage, 100 * done // total, counted(done, total))
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
