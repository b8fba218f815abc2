"""Requests as a round trace shows them (`--round_trace`): lengths as far as visible, and which drafts held.

Whether the draft of a token held is taken to belong to the token, wherever the round began that drafts it;
what the trace never verified is drawn from its conditional acceptance rates. Knows nothing about costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from xspec.core.round import RowFeedback
from xspec.errors import ConfigError
from xspec.sim.loads import OpenLoad, RequestKey
from xspec.sim.world import CERTAIN, SimRequest, drawn
from xspec.trace import Trace

CLIENT_STRIDE = 7919
"""Clients walk through the trace in its order, each from a place of its own."""


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """One request in one retired decode round. `signals` [K'], of the drafts made; None in a plain round."""

    row: RowFeedback
    signals: np.ndarray | None


@dataclass(slots=True)
class RecordedRequest:
    """A request in the order of its rounds. `arrived_s`: clock of the trace when it first decoded."""

    arrived_s: float
    prompt_tokens: int
    rounds: list[RecordedRound] = field(default_factory=list)

    @property
    def answer_tokens(self) -> int:
        """Its prompt's last chunk brought one token, decode rounds the others that the trace shows."""
        return 1 + sum(told.row.committed for told in self.rounds)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The requests of a trace as a population of `draft_width` drafts, in order of arrival.

    `rates` [K]: conditional acceptance over the whole trace. `shifts` [K]: what is added to the logits of the
    signals so that on average they say just that: the best guess at true chances that a trace allows.
    """

    requests: tuple[RecordedRequest, ...]
    rates: tuple[float, ...]
    shifts: tuple[float, ...]
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(trace: Trace, draft_width: int) -> Recorded:
        """ConfigError if the trace shows no request or no verified draft."""
        requests = tuple(_requests(trace).values())
        if not requests:
            raise ConfigError("the round trace shows no request that decoded")
        rounds = [told for request in requests for told in request.rounds]
        rates, notes = _conditional_rates([told.row for told in rounds], draft_width)
        shifts = tuple(_shift(_decided_signals(rounds, k), rate) for k, rate in enumerate(rates))
        return Recorded(requests, rates, shifts, notes)

    @property
    def draft_width(self) -> int:
        return len(self.rates)

    @property
    def most_tokens(self) -> int:
        return max(request.prompt_tokens + request.answer_tokens for request in self.requests)

    def arrivals(self) -> OpenLoad:
        """Requests at the times that the trace has them (its rounds laid end to end), from 0."""
        first = self.requests[0].arrived_s
        return OpenLoad(
            tuple(request.arrived_s - first for request in self.requests), "arrivals of the trace"
        )

    def request(self, seed: int, key: RequestKey, classes: tuple[int, ...] | None) -> SimRequest:
        phase, client, ordinal = key
        found = self.requests[(ordinal + CLIENT_STRIDE * (client + 31 * phase)) % len(self.requests)]
        flags, signals, chances = self._tables(found)
        rng = np.random.default_rng((seed, *key))
        return drawn(key, "recorded", found.prompt_tokens, chances, signals, rng, flags)

    def _tables(self, request: RecordedRequest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[answer, K] each: whether drafts held (1, 0, -1 not known), signals and chances."""
        answer, width = request.answer_tokens, self.draft_width
        flags = np.full(answer + width, -1, dtype=np.int8)
        said = np.full((2, answer + width), np.nan)  # signals and chances by token
        here = np.full((2, answer, width), np.nan)  # the same by place of a round and draft
        place = 1
        for told in request.rounds:
            row, decided = told.row, _decided(told.row)
            flags[place : place + decided] = np.arange(decided) < row.accepted
            if told.signals is not None:
                kept = told.signals[:width]
                both = np.stack([kept, _shifted(kept, np.array(self.shifts[: len(kept)]))])
                here[:, place, : len(kept)] = both
                said[:, place : place + min(decided, len(kept))] = both[:, :decided]
            place += row.committed
        window = np.lib.stride_tricks.sliding_window_view
        by_token = window(said, width, axis=1)[:, :answer]
        signals, chances = np.where(np.isnan(here), by_token, here)
        rates = np.array(self.rates)
        signals = np.where(np.isnan(signals), rates, signals).astype(np.float32)
        return window(flags, width)[:answer], signals, np.where(np.isnan(chances), rates, chances)


def _decided(row: RowFeedback) -> int:
    """Leading drafts of which the target's answer is known: those accepted and the one refused, if any."""
    return row.accepted + (0 if row.censored or row.accepted >= row.verified else 1)


def _decided_signals(rounds: Sequence[RecordedRound], position: int) -> np.ndarray:
    """Signals of all drafts at `position` that were decided."""
    return np.array(
        [
            told.signals[position]
            for told in rounds
            if told.signals is not None and position < min(_decided(told.row), len(told.signals))
        ],
        dtype=np.float64,
    )


def _shifted(signals: np.ndarray, shift: np.ndarray | float) -> np.ndarray:
    """Signals with `shift` added to their logits."""
    inside = np.clip(np.asarray(signals, dtype=np.float64), CERTAIN, 1.0 - CERTAIN)
    chances: np.ndarray = 1.0 / (1.0 + (1.0 - inside) / inside * np.exp(-shift))
    return chances


def _shift(signals: np.ndarray, rate: float) -> float:
    """The shift after which the mean of `signals` is `rate`, by bisection; 0 without signals."""
    low, high = -30.0, 30.0
    while len(signals) and high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if float(_shifted(signals, middle).mean()) < rate else (low, middle)
    return (low + high) / 2


def _requests(trace: Trace) -> dict[int, RecordedRequest]:
    """By sequence id, in order of first decoding."""
    found: dict[int, RecordedRequest] = {}
    clock_s = 0.0
    for entry in trace.rounds:
        for sequence_id, kv_bound in zip(entry.view.sequence_ids, entry.view.kv_bounds, strict=True):
            # the bound counts the token that its prompt's last chunk samples, and nothing else yet
            found.setdefault(sequence_id, RecordedRequest(clock_s, max(1, kv_bound - 1)))
        feedback = entry.feedback
        if feedback is None:
            continue
        clock_s += (feedback.round_ms or 0.0) / 1e3
        for index, row in enumerate(feedback.rows):
            signals = None if feedback.signals is None else feedback.signals[index]
            if row.sequence_id in found:
                found[row.sequence_id].rounds.append(RecordedRound(row, signals))
    return found


def _conditional_rates(
    rows: Sequence[RowFeedback], draft_width: int
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """[k]: share of the drafts k that held, of those verified with all before them accepted."""
    rates: list[float] = []
    notes: tuple[str, ...] = ()
    for position in range(draft_width):
        held = sum(row.accepted > position for row in rows)
        decided = sum(_decided(row) > position for row in rows)
        if decided:
            rates.append(held / decided)
        elif not rates:
            raise ConfigError("the round trace holds no verified draft: record one of a speculative engine")
        else:
            notes = (
                f"no draft beyond position {len(rates)} was verified in the trace: deeper ones are taken to "
                f"be accepted as often as that one",
            )
            rates += [rates[-1]] * (draft_width - position)
            break
    return tuple(rates), notes
