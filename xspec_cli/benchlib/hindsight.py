"""How a policy that adapts compares with the best fixed one, known only afterwards.

The best on the very rounds it is compared on profits from their noise; chosen on the other half of the rounds
(odd for even, even for odd) it does not. Pure functions of throughputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xspec_cli.benchlib.load import Level
from xspec_cli.benchlib.plan import Run, runs_of
from xspec_cli.benchlib.stats import Ratio, median, paired_ratio

SAME_ROUNDS = "chosen on the same rounds"
OTHER_HALF = "chosen on the other half"

Rates = dict[str, list[float]]
"""Policy -> output tokens per second of each round."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A policy over what it has to match. `phase` None: the whole load, else which of its phases.

    `claim` says what the baseline is, `baseline` the policies that it turned out to be.
    """

    level: Level
    phase: int | None
    candidate: str
    claim: str
    baseline: tuple[str, ...]
    chosen: str
    ratio: Ratio


def best(rates: Rates, names: Sequence[str], rounds: Sequence[int]) -> str:
    """The policy of highest median throughput over those rounds; of equal ones the first."""
    return max(names, key=lambda name: median([rates[name][index] for index in rounds]))


def other_half(index: int, count: int) -> list[int]:
    """The rounds of the other parity; the same for all rounds of one parity."""
    return list(range((index + 1) % 2, count, 2))


def choices(rates: Rates, names: Sequence[str], *, across: bool) -> list[str]:
    """[round]: the policy it is compared with. `across`: chosen on the other half, which needs two rounds."""
    count = len(rates[names[0]])
    return [
        best(rates, names, other_half(index, count) if across else range(count)) for index in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Contest:
    """Who is compared. `fixed`: what the best is chosen from; `plain`: the one that never drafts, if any."""

    names: tuple[str, ...]
    fixed: tuple[str, ...]
    plain: str | None = None

    @property
    def candidates(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.fixed)


def verdicts(
    runs: Sequence[Run], levels: Sequence[Level], contest: Contest, *, hindsight: bool, seed: int
) -> list[Verdict]:
    """Per level, candidate and way of choosing; for phases over all of them and in each one.

    A comparison in which somebody produced nothing in some round is left out.
    """
    found: list[Verdict] = []
    if not contest.fixed:
        return found
    for level in levels:
        taken = {name: runs_of(runs, level, name) for name in contest.names}
        for candidate in contest.candidates:
            judge = _Judge(level, taken, contest, candidate, seed)
            for across in (False, True) if hindsight else (False,):
                found += judge.phased(across) if level.phases else judge.whole(across)
            found += judge.against_plain()
    return found


class _Judge:
    """The comparisons of one candidate at one level."""

    def __init__(
        self, level: Level, taken: dict[str, list[Run]], contest: Contest, candidate: str, seed: int
    ) -> None:
        self._level, self._contest, self._candidate, self._seed = level, contest, candidate, seed
        self._rates = {name: [run.tokens_per_s for run in done] for name, done in taken.items()}
        self._by_phase: list[Rates] = [
            {name: [run.phases[index].tokens_per_s for run in done] for name, done in taken.items()}
            for index in range(len(level.phases))
        ]

    def whole(self, across: bool) -> list[Verdict]:
        chosen = choices(self._rates, self._contest.fixed, across=across)
        return self._versus("the best fixed", None, self._rates, chosen, across)

    def phased(self, across: bool) -> list[Verdict]:
        fixed = self._contest.fixed
        single = choices(self._rates, fixed, across=across)
        found = self._versus("the best single fixed", None, self._rates, single, across)
        oracle = [choices(rates, fixed, across=across) for rates in self._by_phase]
        found += self._versus_oracle(oracle, across)
        for index, rates in enumerate(self._by_phase):
            found += self._versus("the best fixed of the phase", index, rates, oracle[index], across)
        return found

    def against_plain(self) -> list[Verdict]:
        plain = self._contest.plain
        if plain is None:
            return []
        found = []
        for phase, rates in ((None, self._rates), *enumerate(self._by_phase)):
            found += self._versus("no speculation", phase, rates, [plain] * len(rates[plain]), None)
        return found

    def _versus(
        self, claim: str, phase: int | None, rates: Rates, chosen: Sequence[str], across: bool | None
    ) -> list[Verdict]:
        below = [rates[name][index] for index, name in enumerate(chosen)]
        return self._verdict(claim, phase, rates[self._candidate], below, chosen, across)

    def _versus_oracle(self, oracle: Sequence[Sequence[str]], across: bool) -> list[Verdict]:
        """The best fixed policy of every phase, put together: [phase][round]."""
        lengths = [phase.seconds for phase in self._level.phases]

        def put_together(pick: Callable[[int, int], str]) -> list[float]:
            """[round]: tokens per second if the policy of each phase is that which `pick` names."""
            return [
                sum(
                    length * rates[pick(phase, index)][index]
                    for phase, (length, rates) in enumerate(zip(lengths, self._by_phase, strict=True))
                )
                / sum(lengths)
                for index in range(len(self._rates[self._candidate]))
            ]

        above = put_together(lambda phase, index: self._candidate)
        below = put_together(lambda phase, index: oracle[phase][index])
        names = [" ".join(dict.fromkeys(chosen)) for chosen in oracle]
        return self._verdict("the oracle of all phases", None, above, below, names, across, unique=False)

    def _verdict(
        self,
        claim: str,
        phase: int | None,
        above: Sequence[float],
        below: Sequence[float],
        baseline: Sequence[str],
        across: bool | None,
        *,
        unique: bool = True,
    ) -> list[Verdict]:
        if not above or min(*above, *below) <= 0.0:
            return []
        return [
            Verdict(
                level=self._level,
                phase=phase,
                candidate=self._candidate,
                claim=claim,
                baseline=tuple(dict.fromkeys(baseline)) if unique else tuple(baseline),
                chosen="" if across is None else OTHER_HALF if across else SAME_ROUNDS,
                ratio=paired_ratio(above, below, seed=self._seed),
            )
        ]
