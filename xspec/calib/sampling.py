"""Offline sampling: which (K, d) pay at which batch size, screened with short answers, confirmed with long.

Screening needs no trial of a pair: its rounds on recorded match flags are exact, and what they cost is in the
table. The best few then run in the engine. What one group of prompts chose is judged by another. Source: the
RFC "Support Adaptive Speculation for Ouro", test plan; docs/looped.md has the whole procedure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from xspec.calib.match_flags import Told
from xspec.calib.replay import Counted, match_rates, replay_grid
from xspec.calib.service import Service
from xspec.calib.trial import Trial, run_trial
from xspec.core.shapes import BucketGrid
from xspec.cost.model import Costs
from xspec.cost.settings import Pair
from xspec.errors import CalibrationError
from xspec.policy.fixed import FixedPolicy
from xspec.progress import Progress

T = TypeVar("T")

Prompt = tuple[int, ...]
Read = Callable[[Sequence[int], Sequence[int]], Told]
"""(prompt, answer) -> the answer's match flags."""

FEWEST_PROMPTS = 4
"""Of a trial, however few are in flight."""

OWN_SHARE = 0.97
"""If less of an answer is the target's own choice in a pass of another shape, its flags mean little."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """`requests`: batch sizes, ascending. Screened with answers of `screen_tokens`, the best `confirm` pairs
    of each batch size run `repeats` times with answers of `confirm_tokens`."""

    requests: tuple[int, ...] = (1, 8, 32)
    screen_tokens: int = 64
    confirm_tokens: int = 256
    confirm: int = 3
    repeats: int = 2


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts, and the class of text each is of."""

    prompts: tuple[Prompt, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Screened:
    """A pair at one batch size by short answers. `speedup` is over plain rounds, by the table."""

    requests: int
    pair: Pair
    round_ms: float
    acceptance: float
    tokens_per_s: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A pair (None: plain rounds) that ran in the engine with long answers. `measured`: decode tokens/s, the
    median of the repeats; `end_to_end`: with prompts; `predicted`: by the table and the selection prompts.
    `round_ms`: of a decode round, None where none was seen with all requests."""

    requests: int
    pair: Pair | None
    predicted: float
    measured: float
    end_to_end: float
    acceptance: float
    round_ms: float | None


@dataclass(frozen=True, slots=True)
class Answers:
    """Long answers of a group and what their flags say: `grid` by (K, d), `rates` by depth."""

    flags: tuple[np.ndarray, ...]
    prompt_tokens: tuple[int, ...]
    classes: tuple[str, ...]
    grid: Mapping[Pair, Counted]
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Everything that offline sampling found. `evaluated`: plain rounds and the chosen pair of each batch
    size on prompts that had no say in choosing."""

    settings: SamplingSettings
    depths: tuple[int, ...]
    pairs: tuple[Pair, ...]
    costs: Mapping[int, tuple[float, Mapping[Pair, float]]]  # by batch size: ms of a plain round, of others
    screened: tuple[Screened, ...]
    confirmed: tuple[Confirmed, ...]
    evaluated: tuple[Confirmed, ...]
    selection: Answers
    evaluation: Answers

    def best(self, requests: int) -> Confirmed:
        """What was fastest in the engine on the selection prompts, plain rounds included."""
        return max((c for c in self.confirmed if c.requests == requests), key=lambda c: c.measured)

    def confirmed_costs(self, requests: int) -> tuple[float, Mapping[Pair, float]]:
        """(ms of a plain round, of every pair's): as the trials saw them. Pairs that did not run keep what
        the table says, times what all that ran took over what it says of them, the median: one of them
        alone, say plain rounds, may have met a slow minute in the table or in the trials."""
        plain_ms, of_pair = self.costs[requests]
        seen = {c.pair: c.round_ms for c in self.confirmed if c.requests == requests and c.round_ms}
        told: list[tuple[Pair | None, float]] = [(None, plain_ms), *of_pair.items()]
        ratios = [seen[pair] / ms for pair, ms in told if pair in seen]
        ratio = statistics.median(ratios) if ratios else 1.0
        return seen.get(None, plain_ms), {pair: seen.get(pair, ms * ratio) for pair, ms in of_pair.items()}

    def best_pair(self, requests: int) -> Pair:
        """The fastest pair, though plain rounds may be faster."""
        ran = [c for c in self.confirmed if c.requests == requests and c.pair is not None]
        pair = max(ran, key=lambda c: c.measured).pair
        assert pair is not None
        return pair


class Sampler:
    """On an idle engine whose K/V memory nobody uses. `read`: a FlagReader's, of those `depths`, on the
    launch thread; `lanes`: what rounds are padded to; `pairs`: the grid."""

    def __init__(
        self,
        service: Service,
        read: Read,
        depths: Sequence[int],
        table: Costs,
        lanes: BucketGrid,
        pairs: Sequence[Pair],
        settings: SamplingSettings,
        progress: Progress,
    ) -> None:
        self._service, self._read, self._depths = service, read, tuple(depths)
        self._table, self._lanes, self._pairs = table, lanes, tuple(pairs)
        self._settings, self._progress = settings, progress

    def sample(self, selection: Group, evaluation: Group) -> Sampled:
        """CalibrationError where costs or prompts do not reach; EngineError if a round is lost."""
        settings = self._settings
        costs = {requests: self._costs(requests, selection) for requests in settings.requests}
        short = self._answers(selection, self._plain_answers(selection, settings.screen_tokens))
        screened = tuple(self._screen(costs, short))
        trials = self._confirm(screened, selection)
        most = settings.requests[-1]
        chosen = self._answers(selection, trials[most, None][0].answers)
        confirmed = tuple(self._judge(trials, costs, chosen.grid))
        found = Sampled(
            settings=settings,
            depths=self._depths,
            pairs=self._pairs,
            costs=costs,
            screened=screened,
            confirmed=confirmed,
            evaluated=(),
            selection=chosen,
            evaluation=chosen,
        )
        wanted = {requests: [None, found.best_pair(requests)] for requests in settings.requests}
        judged = self._run(wanted, evaluation, "evaluating")
        return replace(
            found,
            evaluated=tuple(self._judge(judged, costs, chosen.grid)),
            evaluation=self._answers(evaluation, judged[most, None][0].answers),
        )

    # -- screening ----------------------------------------------------------------------------

    def _costs(self, requests: int, group: Group) -> tuple[float, Mapping[Pair, float]]:
        """Of a batch half way through its long answers. Pairs without a cost are left out."""
        prompt = statistics.fmean(map(len, group.prompts))
        length = round(prompt + self._settings.confirm_tokens / 2)
        lanes, at = self._lanes.fit(requests).rows, self._table.at([length] * requests)
        plain = None if at is None else at.round_ms(0, lanes, lanes)
        if at is None or plain is None:
            raise CalibrationError(
                f"the cost table says nothing of {requests} requests with a KV length of {length}"
            )
        of_pair = {pair: at.round_ms(pair[0], lanes, lanes * (pair[0] + 1), pair[1]) for pair in self._pairs}
        known = {pair: ms for pair, ms in of_pair.items() if ms is not None}
        if not known:
            raise CalibrationError(f"the cost table has no (K, d) at {requests} requests")
        return plain, known

    def _plain_answers(self, group: Group, tokens: int) -> tuple[tuple[int, ...], ...]:
        most, total = self._settings.requests[-1], len(group.prompts)

        def told(done: int) -> None:
            self._progress("screening", done, total)

        return self._trial(FixedPolicy(), group.prompts, tokens, most, told).answers

    def _answers(self, group: Group, answers: Sequence[Sequence[int]]) -> Answers:
        """Reads the flags of answers to the group's prompts, to the first of them if they are fewer."""
        flags, own = [], []
        asked = zip(_cycled(group.prompts, len(answers)), answers, strict=True)
        for index, (prompt, answer) in enumerate(asked):
            self._progress("reading match flags", index, len(answers))
            told = self._read(prompt, answer)
            flags.append(told.flags)
            own.append(told.own)
        self._progress("reading match flags", len(answers), len(answers))
        share = float(np.concatenate(own).mean())
        if share < OWN_SHARE:
            raise CalibrationError(
                f"only {100 * share:.1f} % of the answers are what the target picks in a pass over them: "
                "flags would not be those of rounds; near ties of a low precision? Give --dtype=float32"
            )
        count = len(answers)
        return Answers(
            flags=tuple(flags),
            prompt_tokens=tuple(map(len, _cycled(group.prompts, count))),
            classes=tuple(_cycled(group.classes, count)),
            grid=replay_grid(flags, self._depths, self._pairs),
            rates=match_rates(flags),
        )

    def _screen(
        self, costs: Mapping[int, tuple[float, Mapping[Pair, float]]], short: Answers
    ) -> Iterator[Screened]:
        for requests, (plain_ms, of_pair) in costs.items():
            for pair, ms in of_pair.items():
                counted = short.grid[pair]
                yield Screened(
                    requests=requests,
                    pair=pair,
                    round_ms=ms,
                    acceptance=counted.acceptance,
                    tokens_per_s=1e3 * requests * counted.tokens_per_round / ms,
                    speedup=counted.tokens_per_round * plain_ms / ms,
                )

    # -- trials -------------------------------------------------------------------------------

    def _confirm(
        self, screened: Sequence[Screened], group: Group
    ) -> dict[tuple[int, Pair | None], list[Trial]]:
        wanted: dict[int, list[Pair | None]] = {}
        for requests in self._settings.requests:
            mine = sorted((s for s in screened if s.requests == requests), key=lambda s: -s.speedup)
            wanted[requests] = [None, *(s.pair for s in mine[: self._settings.confirm])]
        return self._run(wanted, group, "confirming")

    def _run(
        self, wanted: Mapping[int, Sequence[Pair | None]], group: Group, stage: str
    ) -> dict[tuple[int, Pair | None], list[Trial]]:
        """Trials of every pair, alternating, so that a noisy machine meets all of them alike."""
        found: dict[tuple[int, Pair | None], list[Trial]] = {}
        total, done = self._settings.repeats * sum(map(len, wanted.values())), 0
        for requests, pairs in wanted.items():
            prompts = _cycled(group.prompts, max(requests, FEWEST_PROMPTS))
            for repeat in range(self._settings.repeats):
                first = repeat % len(pairs)
                for pair in (*pairs[first:], *pairs[:first]):
                    self._progress(stage, done, total)
                    policy = FixedPolicy() if pair is None else FixedPolicy(pair[0], depth=pair[1])
                    trial = self._trial(policy, prompts, self._settings.confirm_tokens, requests)
                    found.setdefault((requests, pair), []).append(trial)
                    done += 1
        self._progress(stage, total, total)
        return found

    def _trial(
        self,
        policy: FixedPolicy,
        prompts: Sequence[Prompt],
        tokens: int,
        requests: int,
        told: Callable[[int], None] = lambda done: None,
    ) -> Trial:
        return run_trial(self._service, policy, prompts, answer_tokens=tokens, requests=requests, told=told)

    def _judge(
        self,
        trials: Mapping[tuple[int, Pair | None], Sequence[Trial]],
        costs: Mapping[int, tuple[float, Mapping[Pair, float]]],
        grid: Mapping[Pair, Counted],
    ) -> Iterator[Confirmed]:
        for (requests, pair), ran in trials.items():
            plain_ms, of_pair = costs[requests]
            rate = 1.0 if pair is None else grid[pair].tokens_per_round
            ms = plain_ms if pair is None else of_pair[pair]
            decode = [t.decode_tokens_per_s or t.tokens_per_s for t in ran]
            yield Confirmed(
                requests=requests,
                pair=pair,
                predicted=1e3 * requests * rate / ms,
                measured=statistics.median(decode),
                end_to_end=statistics.median(t.tokens_per_s for t in ran),
                acceptance=ran[0].acceptance,
                round_ms=_median([t.round_ms for t in ran if t.round_ms is not None]),
            )


def batch_ranges(requests: Sequence[int], most: int) -> list[tuple[int, int]]:
    """[(first, last)] of the range that each sampled batch size stands for: they meet half way by factors."""
    ends = [math.isqrt(one * two) for one, two in zip(requests, requests[1:], strict=False)]
    firsts = [1, *(end + 1 for end in ends)]
    return list(zip(firsts, [*ends, max(most, requests[-1])], strict=True))


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _cycled(values: Sequence[T], count: int) -> list[T]:
    return [values[index % len(values)] for index in range(count)]
