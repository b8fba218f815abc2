"""Contenders over one world: every fixed width, the adaptive policy, the oracle; their figures and regrets.

Knows nothing about files or flags.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from xspec.cost.model import Costs
from xspec.cost.settings import Control
from xspec.errors import ConfigError
from xspec.policy.fixed import FixedPolicy
from xspec.policy.geometry import PolicyGeometry
from xspec.policy.make import make_policy
from xspec.policy.settings import DraftStepSettings
from xspec.sim.device import UncoveredError
from xspec.sim.oracle import OraclePolicy
from xspec.sim.simulate import EngineShape, MakePolicy, RoundRecord, Run, simulate
from xspec.sim.world import World

ADAPTIVE = "adaptive"
ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to run the engine. `fixed`: it may be the best fixed width in hindsight."""

    name: str
    make: MakePolicy
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class DifficultyFigures:
    """One difficulty class. Per request and decode round: rows it had in verification, its last token's
    included, and tokens it gained."""

    name: str
    verify_rows: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One contender in one phase, or over all of them.

    `tokens_per_round`: committed per request in a decode round. `switches`: changes of the depth or between
    plain and speculative rounds, of choice and not to probe; `tier_changes`: those of the verify rows alone.
    """

    label: str
    seconds: float
    tokens: int
    decode_rounds: int
    tokens_per_round: float
    mean_requests: float
    plain_share: float
    probe_share: float
    switches: int
    tier_changes: int
    choices: tuple[tuple[str, int], ...]  # most frequent first
    difficulties: tuple[DifficultyFigures, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def switches_per_minute(self) -> float:
        return 60.0 * self.switches / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a contender; `refused` says why it could not run, and then there are no figures."""

    contender: Contender
    run: Run | None
    total: Figures | None
    phases: tuple[Figures, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcomes in order. A regret is the share of another one's tokens/s that is lost (below 0: gained)."""

    outcomes: tuple[Outcome, ...]
    labels: tuple[str, ...]

    def of(self, name: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.contender.name == name)

    def best_fixed(self, phase: int | None = None) -> Outcome:
        """The best fixed width in hindsight, of one phase or of the whole load."""
        ran = [o for o in self.outcomes if o.contender.fixed and o.total is not None]
        if not ran:
            why = next((o.refused for o in self.outcomes if o.refused), "none was run")
            raise ConfigError(f"the cost table covers no fixed width under this load: {why}")
        return max(ran, key=lambda outcome: rate_of(outcome, phase))

    def per_phase_best(self) -> float:
        """Tokens/s of an engine that ran each phase of the load at that phase's best fixed width."""
        best = [self.best_fixed(phase).phases[phase] for phase in range(len(self.labels))]
        seconds = sum(figures.seconds for figures in best)
        return sum(figures.tokens for figures in best) / seconds if seconds else 0.0

    def regret(self, outcome: Outcome, against: Outcome, phase: int | None = None) -> float | None:
        """None where one of them did not run or nothing was produced."""
        if outcome.total is None or against.total is None or not rate_of(against, phase):
            return None
        return 1.0 - rate_of(outcome, phase) / rate_of(against, phase)

    def regret_oracle(self, outcome: Outcome, phase: int | None = None) -> float | None:
        """Against the oracle; where none took part, against each phase at its own best fixed width."""
        oracle = next((one for one in self.outcomes if one.contender.name == ORACLE), None)
        if oracle is not None or phase is not None:
            return self.regret(outcome, oracle or self.best_fixed(phase), phase)
        best = self.per_phase_best()
        return None if outcome.total is None or not best else 1.0 - rate_of(outcome, None) / best


def rate_of(outcome: Outcome, phase: int | None) -> float:
    """Tokens/s of an outcome that ran, in one phase or in all."""
    figures = outcome.total if phase is None else outcome.phases[phase]
    assert figures is not None
    return figures.tokens_per_s


def fixed_contenders(control: Control, draft_width: int) -> Iterator[Contender]:
    """No speculation and every fixed width: depths (draft step) or drafts verified of K (target verify)."""
    yield Contender("plain", lambda device: FixedPolicy(), fixed=True)
    for width in range(1, draft_width + 1):
        if control is Control.DRAFT_STEP:
            yield Contender(f"depth {width}", _fixed(width, None), fixed=True)
        else:
            yield Contender(f"verify {width}", _fixed(draft_width, width), fixed=True)


def _fixed(draft_steps: int, verify_steps: int | None) -> MakePolicy:
    return lambda device: FixedPolicy(draft_steps, verify_steps)


def adaptive_contender(
    control: Control, costs: Costs, geometry: PolicyGeometry, settings: DraftStepSettings
) -> Contender:
    return Contender(ADAPTIVE, lambda device: make_policy(control, costs, geometry, settings))


def oracle_contender(control: Control, costs: Costs, geometry: PolicyGeometry) -> Contender:
    return Contender(ORACLE, lambda device: OraclePolicy(device, costs, control, geometry))


def compare(
    world: World,
    costs: Costs,
    engine: EngineShape,
    contenders: Iterable[Contender],
    told: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """Run each contender over `world`; `told` hears its name before.

    One whose rounds have no measured cost is refused in its outcome. ConfigError if the world does not fit.
    """
    labels = tuple(label for label, _ in world.load.phases)
    outcomes = []
    for contender in contenders:
        told(contender.name)
        try:
            run = simulate(world, costs, engine, contender.make)
        except UncoveredError as error:
            outcomes.append(Outcome(contender, None, None, refused=str(error)))
            continue
        phases = tuple(
            figures_of(label, [r for r in run.rounds if r.phase == index])
            for index, label in enumerate(labels)
        )
        outcomes.append(Outcome(contender, run, figures_of("all", run.rounds), phases))
    return Comparison(tuple(outcomes), labels)


def figures_of(label: str, rounds: Sequence[RoundRecord]) -> Figures:
    """Figures of consecutive rounds."""
    decoding = [r for r in rounds if r.requests]
    gained = [told for r in decoding for told in r.rows]
    settled = [r for r in decoding if r.draftable and not r.probe]
    pairs = list(zip(settled, settled[1:], strict=False))
    return Figures(
        label=label,
        seconds=sum(r.interval_s for r in rounds),
        tokens=sum(r.tokens for r in rounds),
        decode_rounds=len(decoding),
        tokens_per_round=_mean([told.committed for told in gained]),
        mean_requests=_mean([r.requests for r in decoding]),
        plain_share=_mean([not r.draft_steps for r in decoding]),
        probe_share=_mean([r.probe for r in decoding]),
        switches=sum(_pair(a) != _pair(b) for a, b in pairs),
        tier_changes=sum(
            _pair(a) == _pair(b) and a.target_rows != b.target_rows and a.requests == b.requests
            for a, b in pairs
        ),
        choices=tuple(Counter(map(choice_of, decoding)).most_common()),
        difficulties=tuple(_difficulties(decoding)),
    )


def choice_of(record: RoundRecord) -> str:
    """What a decode round ran, in a word or two."""
    if not record.draft_steps:
        return "plain"
    if record.depth is not None:
        return f"{record.draft_steps}@{record.depth}"
    return f"{record.draft_steps} drafts, {record.target_rows} rows"


def _pair(record: RoundRecord) -> tuple[int, int | None]:
    return record.draft_steps, record.depth


def _difficulties(rounds: Sequence[RoundRecord]) -> Iterator[DifficultyFigures]:
    names = sorted({told.difficulty for r in rounds for told in r.rows})
    for name in names:
        of = [told for r in rounds for told in r.rows if told.difficulty == name]
        rows = _mean([told.verified + 1 for told in of])
        yield DifficultyFigures(name, rows, _mean([told.committed for told in of]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
