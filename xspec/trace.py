"""The round trace: a JSON line for every round, and the replay of a policy over it.

A line holds what the policy saw, what it decided and what became of the round: a fresh policy fed with the
lines must decide the same again. Knows nothing about devices or text; nothing reads it to decide.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from xspec.core.round import RoundFeedback, RowFeedback, SpeculationPlan
from xspec.core.shapes import RoundShape
from xspec.errors import ConfigError
from xspec.policy.base import Policy, PolicyView

logger = logging.getLogger(__name__)

FLAG = "--round_trace"
FORMAT = "xspec round trace"
VERSION = 1

_GATHER_S = 0.25
"""So long the writer lets lines gather before it writes them in one go."""

_MAX_WAITING_ROUNDS = 100_000
"""Rounds that may wait for a disk that has stopped taking any."""


@dataclass(frozen=True, slots=True)
class TracedRound:
    """One line. `observed`: rounds that the policy had observed when it planned this one.

    `feedback` is None, and `error` says why, where the round was lost or in flight when the trace ended.
    """

    view: PolicyView
    plan: SpeculationPlan
    observed: int
    feedback: RoundFeedback | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace as read. `about` is what the engine said of itself, `notes` what was tolerated in reading."""

    about: Mapping[str, Any]
    rounds: tuple[TracedRound, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A decision that came out differently when it was replayed."""

    recorded: SpeculationPlan
    replayed: SpeculationPlan


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def check_trace_file(path: str) -> None:
    """Refuse, before anything is loaded, a file that exists or whose folder does not. ConfigError."""
    try:
        target = Path(path).expanduser()
        exists, folder = target.exists() or target.is_symlink(), target.parent.is_dir()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{FLAG}={path}: cannot be written: {error}") from error
    if exists:
        raise ConfigError(f"{FLAG}={path}: exists already; allowed: a file that does not exist yet")
    if not folder:
        raise ConfigError(f"{FLAG}={path}: there is no folder {target.parent}; make it first")


class RoundTrace:
    """Writes a trace. Its methods only hand over to a thread that writes, so a slow disk holds nobody up.

    A disk that fails, or takes nothing for very long, ends the trace with one log line, never the engine.
    """

    def __init__(self, path: str, about: Mapping[str, Any] | None = None) -> None:
        """Makes the file. ConfigError, naming the flag, if it exists or cannot be made.

        `about`: JSON-ready facts for the first line.
        """
        check_trace_file(path)
        self._path = Path(path).expanduser()
        self._about = dict(about or {})
        try:
            self._file: BinaryIO = open(self._path, "xb")  # noqa: SIM115 (the writer thread closes it)
        except OSError as error:
            raise ConfigError(f"{FLAG}={path}: cannot be written: {error.strerror or error}") from error
        self._planned: deque[TracedRound] = deque()
        self._waiting: deque[TracedRound] = deque()
        self._something = threading.Event()
        self._closing = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._write, name="xspec-trace", daemon=True)
        self._thread.start()

    def planned(self, view: PolicyView, plan: SpeculationPlan, observed: int) -> None:
        """A round was planned and submitted; `observed` rounds had been shown to the policy before."""
        self._planned.append(TracedRound(view, plan, observed, None))

    def retired(
        self, plan_id: int, feedback: RoundFeedback | None, error: BaseException | None = None
    ) -> None:
        """The oldest planned round is done: its feedback as the policy saw it, or the error that took it."""
        entry = self._planned.popleft()
        if entry.plan.plan_id != plan_id:
            raise ValueError(f"round {plan_id} retired before round {entry.plan.plan_id}")
        said = None if error is None else f"{type(error).__name__}: {error}"
        self._hand_over(TracedRound(entry.view, entry.plan, entry.observed, feedback, said))

    def close(self) -> None:
        """Write what is left, rounds in flight included, and close the file. Blocks; may be called twice."""
        while self._planned:
            entry = self._planned.popleft()
            said = "in flight when the trace ended"
            self._hand_over(TracedRound(entry.view, entry.plan, entry.observed, None, said))
        self._closing.set()
        self._something.set()
        self._thread.join()

    def _hand_over(self, entry: TracedRound) -> None:
        if self._ended:
            return
        if len(self._waiting) >= _MAX_WAITING_ROUNDS:
            self._ended = True
            logger.error("%s=%s: the disk is too slow; the trace ends here", FLAG, self._path)
            return
        self._waiting.append(entry)
        self._something.set()

    def _write(self) -> None:
        """The writer thread."""
        try:
            with self._file:
                header = {"format": FORMAT, "version": VERSION, "about": self._about}
                self._file.write(_json(header))
                self._file.flush()
                while not self._closing.is_set():
                    self._something.wait()
                    self._closing.wait(_GATHER_S)
                    self._something.clear()
                    self._drain()
                self._drain()
        except Exception as error:  # whatever it is, the engine does not need a trace
            self._ended = True
            self._waiting.clear()
            logger.error("%s=%s: the trace ends here: %s", FLAG, self._path, error)

    def _drain(self) -> None:
        while self._waiting:
            self._file.write(_line(self._waiting.popleft()))
        self._file.flush()


def _line(entry: TracedRound) -> bytes:
    feedback = entry.feedback
    line: dict[str, Any] = {
        "round": entry.plan.plan_id,
        "observed": entry.observed,
        "view": entry.view,
        "plan": entry.plan,
        "feedback": None,
        "error": entry.error,
    }
    if feedback is not None:
        line["feedback"] = {
            "shape": feedback.shape,
            "rows": feedback.rows,
            "round_ms": feedback.round_ms,
            "prefill_tokens": feedback.prefill_tokens,
            "committed_tokens": feedback.committed_tokens,
            "signals": _signals_out(feedback.signals),
            "matches": _matches_out(feedback.matches),
        }
    return _json(line)


def _json(line: Mapping[str, Any]) -> bytes:
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


def _signals_out(signals: np.ndarray | None) -> dict[str, Any] | None:
    """float32 as doubles, which hold each of them exactly; JSON knows no numbers that are not finite."""
    if signals is None:
        return None
    values: list[Any] = np.asarray(signals, dtype=np.float32).ravel().tolist()
    if not all(map(math.isfinite, values)):
        values = [value if math.isfinite(value) else repr(value) for value in values]
    return {"shape": list(signals.shape), "values": values}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def read_trace(path: Path | str) -> Trace:
    """Read a trace. A last line that was cut short is left out with a note; ConfigError for anything else."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"round trace {path}: cannot be read: {error.strerror or error}") from error
    unfinished = lines.pop()  # what follows the last line end: nothing, unless a line was cut short
    notes = ("the last line was cut short and is left out",) if unfinished else ()
    about = _header(path, lines[0] if lines else b"")
    rounds = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rounds.append(_round(orjson.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"round trace {path}, line {number}: {error!r}") from error
    return Trace(about, tuple(rounds), notes)


def _header(path: Path | str, line: bytes) -> Mapping[str, Any]:
    try:
        header = orjson.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ConfigError(f"round trace {path}: the first line is not that of a round trace")
    if header.get("version") != VERSION:
        raise ConfigError(f"round trace {path}: version {header.get('version')!r}; allowed: {VERSION}")
    return dict(header.get("about") or {})


def _round(line: dict[str, Any]) -> TracedRound:
    seen: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in line["view"].items()
    }
    plan = SpeculationPlan(**line["plan"])
    told = line["feedback"]
    feedback = None
    if told is not None:
        feedback = RoundFeedback(
            plan=plan,
            shape=RoundShape(**told["shape"]),
            rows=tuple(RowFeedback(**row) for row in told["rows"]),
            round_ms=told["round_ms"],
            prefill_tokens=told["prefill_tokens"],
            committed_tokens=told["committed_tokens"],
            signals=_signals_in(told["signals"]),
            matches=_matches_in(told.get("matches")),
        )
    return TracedRound(PolicyView(**seen), plan, line["observed"], feedback, line["error"])


def _signals_in(told: dict[str, Any] | None) -> np.ndarray | None:
    if told is None:
        return None
    values = [float(value) for value in told["values"]]
    return np.array(values, dtype=np.float32).reshape(told["shape"])


def _matches_out(matches: np.ndarray | None) -> dict[str, Any] | None:
    if matches is None:
        return None
    return {"shape": list(matches.shape), "values": matches.astype(np.uint8).ravel().tolist()}


def _matches_in(told: dict[str, Any] | None) -> np.ndarray | None:
    if told is None:
        return None
    return np.array(told["values"], dtype=np.uint8).astype(bool).reshape(told["shape"])


# ── replaying ────────────────────────────────────────────────────────────────────────────────────


def replay(policy: Policy, trace: Trace) -> list[Mismatch]:
    """Every decision that a fresh `policy` takes differently, fed with views and feedback in recorded order.

    The trace must be that of one policy from its start: ConfigError if another has planned rounds of it, or
    if the order cannot be restored (a line says that more had been observed than there is feedback of).
    """
    others = {entry.plan.policy for entry in trace.rounds} - {policy.name}
    if others:
        raise ConfigError(
            f"round trace: {', '.join(sorted(others))} planned rounds of it; allowed: {policy.name}"
        )
    mismatches = []
    feedback = [entry.feedback for entry in trace.rounds if entry.feedback is not None]
    observed = 0
    for entry in trace.rounds:
        if not observed <= entry.observed <= len(feedback):
            raise ConfigError(
                f"round trace: round {entry.plan.plan_id} was planned after {entry.observed} observed "
                f"rounds, the one before after {observed}, and {len(feedback)} have feedback"
            )
        for told in feedback[observed : entry.observed]:
            policy.observe(told)
        observed = entry.observed
        decided = policy.plan(entry.view)
        if decided != entry.plan:
            mismatches.append(Mismatch(entry.plan, decided))
    return mismatches
