"""The file of `--adaptive_spec_config` and of the presets: candidates (K, d) by batch range, and settings.

Plain values with the strict reader of their JSON: every mistake in a file is reported, not only the first.
Whether candidates fit an engine is decided in `spec_check.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from xspec.config import MAX_DRAFT_STEPS, MAX_LOOPS
from xspec.cost.read import (
    BadValue,
    Reader,
    choice,
    count,
    listing,
    mapping,
    read_object,
    refusal,
    text,
    truth,
)
from xspec.errors import UnsupportedError

VERSION = 1
MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """One (K, d). `up`: acceptance above which the next candidate is better, `down`: below which the one
    before is; `off`: at which it gains nothing over plain rounds; `acceptance`: what was measured offline,
    the seed of its average. Each None where the file does not say. `draft_loops` None: not a looped drafter.
    """

    draft_steps: int
    draft_loops: int | None = None
    up: float | None = None
    down: float | None = None
    off: float | None = None
    acceptance: float | None = None

    def __str__(self) -> str:
        return f"{self.draft_steps}" if self.draft_loops is None else f"{self.draft_steps}@{self.draft_loops}"


@dataclass(frozen=True, slots=True)
class EmaSettings:
    """E <- (1 - beta) E + beta r each feedback round; looked at every `interval` of them, once the present
    candidate has `min_feedback` drafts of evidence."""

    beta: float = 0.1
    interval: int = 4
    min_feedback: int = 16


@dataclass(frozen=True, slots=True)
class DisableSettings:
    """Off below a gain of 1 - `margin` at `checks` looks, on again above 1 + `margin`. Probes of at first
    `probe_rounds` rounds come after `backoff_first` plain rounds, then twice as many, up to `backoff_cap`;
    they may cost `probe_share` of the time."""

    enabled: bool = True
    margin: float = 0.01
    checks: int = 2
    backoff_first: int = 12
    backoff_cap: int = 48
    probe_rounds: int = 2
    probe_share: float = 0.0175


@dataclass(frozen=True, slots=True)
class GoodputSettings:
    """A switch must promise more than `margin` at `checks` looks, one every `interval` decode rounds.
    `shadow_share` of rounds tell all depths, in bursts of `shadow_burst`; evidence is that of about the last
    `window_flags` tokens."""

    margin: float = 0.02
    checks: int = 2
    interval: int = 4
    shadow_share: float = 0.0625
    shadow_burst: int = 8
    window_flags: int = 512


@dataclass(frozen=True, slots=True)
class BatchRange:
    """Candidates for `min_requests` .. `max_requests` decode rows, in order, the least aggressive first.

    `ema` None: that of the whole file. `initial_off`: begins with plain rounds, to be probed."""

    min_requests: int
    max_requests: int
    candidates: tuple[Candidate, ...]
    initial: int = 0
    initial_off: bool = False
    ema: EmaSettings | None = None

    @property
    def requests(self) -> str:
        return f"{self.min_requests}-{self.max_requests} requests"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the candidates are for. `loops`: D of a looped target, None for others."""

    name: str
    loops: int | None = None


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the numbers come from: "measured" here, or "prior": published or guessed, to be replaced."""

    kind: str
    source: str
    created_at: str | None = None


@dataclass(frozen=True, slots=True)
class AdaptiveSpecConfig:
    """Ranges ascending, none overlapping. `fingerprint`: plain JSON facts of the engine that was measured."""

    model: ModelFacts
    provenance: Provenance
    ranges: tuple[BatchRange, ...]
    ema: EmaSettings = EmaSettings()
    disable: DisableSettings = DisableSettings()
    goodput: GoodputSettings = GoodputSettings()
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Of all ranges, in order."""
        return tuple(candidate for one in self.ranges for candidate in one.candidates)

    @property
    def steps(self) -> tuple[int, ...]:
        """All K, ascending: what an engine must prepare."""
        return tuple(sorted({candidate.draft_steps for candidate in self.candidates}))

    @property
    def depths(self) -> tuple[int, ...]:
        """All d, ascending; () without loops."""
        return tuple(sorted({c.draft_loops for c in self.candidates if c.draft_loops is not None}))

    def ema_of(self, index: int) -> EmaSettings:
        return self.ranges[index].ema or self.ema


# -- reading and writing --------------------------------------------------------------------------


def parse_spec_config(raw: object, where: str) -> AdaptiveSpecConfig:
    """The configuration that parsed JSON holds; missing optional keys keep their defaults.

    `where` says whose object it is (a flag and file) in the UnsupportedError, which names every key that is
    unknown, missing or holds a value that is not allowed.
    """
    mistakes: list[str] = []
    values = read_object(raw, _DOCUMENT, "", mistakes, needed=("version", "model", "provenance", "ranges"))
    ranges = tuple(values.get("ranges", ()))  # None: could not be read
    model = values.get("model")
    mistakes.extend(_across(ranges))
    if model is not None:
        mistakes.extend(_loop_mistakes(ranges, model.loops))
    if mistakes:
        raise UnsupportedError(f"{where} is no valid adaptive speculation config", mistakes)
    values.pop("version")
    return AdaptiveSpecConfig(**(values | {"ranges": ranges}))


def spec_config_json(config: AdaptiveSpecConfig) -> dict[str, Any]:
    """The inverse of `parse_spec_config`, no default left out; values that are None have no key."""
    document: dict[str, Any] = {"version": VERSION, **_plain(config)}
    if not config.fingerprint:
        del document["fingerprint"]
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    if not hasattr(value, "__dataclass_fields__"):
        return value
    held = {item.name: getattr(value, item.name) for item in fields(value)}
    return {name: _plain(item) for name, item in held.items() if item is not None}


# -- what must hold between values ----------------------------------------------------------------


def _across(ranges: Sequence[BatchRange | None]) -> Iterator[str]:
    read = [(index, one) for index, one in enumerate(ranges) if one is not None]
    for (_, one), (index, two) in zip(read, read[1:], strict=False):
        if two.min_requests <= one.max_requests:
            yield (
                f"ranges[{index}]: found {two.requests} after {one.requests}; allowed: ascending ranges that "
                "do not overlap"
            )


def _loop_mistakes(ranges: Sequence[BatchRange | None], loops: int | None) -> Iterator[str]:
    for index, one in enumerate(ranges):
        for j, candidate in enumerate(() if one is None else one.candidates):
            where, found = f"ranges[{index}].candidates[{j}].draft_loops", candidate.draft_loops
            if loops is None and found is not None:
                yield refusal(where, found, "nothing, because model.loops is not given")
            if loops is not None and found is None:
                yield f"{where} is missing: model.loops is {loops}; allowed: integers from 1 to {loops - 1}"
            if loops is not None and found is not None and found >= loops:
                yield refusal(where, found, f"integers from 1 to {loops - 1}, below model.loops")


def _range_mistakes(one: BatchRange, where: str) -> Iterator[str]:
    if one.min_requests > one.max_requests:
        yield f"{where}: found {one.requests}; allowed: min_requests up to max_requests"
    last = len(one.candidates) - 1
    if one.initial > last:
        yield refusal(f"{where}.initial", one.initial, f"a candidate's place, 0 to {last}")
    seen: dict[tuple[int, int | None], int] = {}
    for j, candidate in enumerate(one.candidates):
        place = f"{where}.candidates[{j}]"
        first = seen.setdefault((candidate.draft_steps, candidate.draft_loops), j)
        if first != j:
            yield f"{place}: {candidate} again, which is candidates[{first}]; allowed: each pair once"
        yield from _threshold_mistakes(candidate, j, last, place)


def _threshold_mistakes(candidate: Candidate, j: int, last: int, where: str) -> Iterator[str]:
    up, down = candidate.up, candidate.down
    for name, value, needed, neighbour in (("up", up, j < last, "after"), ("down", down, j > 0, "before")):
        if value is None and needed:
            yield f"{where}.{name} is missing: there is a candidate {neighbour} it"
        if value is not None and not needed:
            yield f"{where}.{name}: found {value:g}; allowed: nothing, there is no candidate {neighbour} it"
    if up is not None and down is not None and down >= up:
        yield f"{where}: found down {down:g} and up {up:g}; allowed: down below up, a dead band between them"


# -- readers --------------------------------------------------------------------------------------


def _between(low: float, high: float, *, above: bool = False, below: bool = False) -> Reader:
    """Numbers from `low` to `high`; `above`, `below`: without that end."""

    def read(value: Any, where: str, mistakes: list[str]) -> float:
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
        if isinstance(number, int) and abs(number) > 2**63:  # no double may hold it
            number = None
        if (
            number is None
            or not low <= number <= high
            or (above and number == low)
            or (below and number == high)
        ):
            ends = f"{'above' if above else 'from'} {low:g} {'to below' if below else 'to'} {high:g}"
            raise BadValue(refusal(where, value, f"numbers {ends}"))
        return float(number)

    return read


def _record(make: Any, readers: Mapping[str, Reader], needed: tuple[str, ...], check: Any = None) -> Reader:
    """An object as `make(**values)`, with what `check` says of it; None where a value is wrong or missing."""

    def read(value: Any, where: str, mistakes: list[str]) -> Any:
        before = len(mistakes)
        values = read_object(value, readers, where, mistakes, needed)
        if len(mistakes) > before:
            return None
        found = make(**values)
        if check is not None:
            mistakes.extend(check(found, where))
        return found

    return read


def _version(value: Any, where: str, mistakes: list[str]) -> int:
    if value != VERSION or isinstance(value, bool) or not isinstance(value, int):
        raise BadValue(refusal(where, value, str(VERSION)))
    return value


def _backoff_mistakes(found: DisableSettings, where: str) -> Iterator[str]:
    if found.backoff_first > found.backoff_cap:
        yield (
            f"{where}: found backoff_first {found.backoff_first} and backoff_cap {found.backoff_cap}; "
            "allowed: backoff_first up to backoff_cap"
        )


def _range(value: Any, where: str, mistakes: list[str]) -> BatchRange | None:
    """What holds between the values of a range is only looked at where each of them could be read."""
    before = len(mistakes)
    values = read_object(value, _RANGE, where, mistakes, ("min_requests", "max_requests", "candidates"))
    if len(mistakes) > before:
        return None
    found = BatchRange(**values)
    mistakes.extend(_range_mistakes(found, where))
    return found


_share = _between(0.0, 1.0)

_CANDIDATE: Mapping[str, Reader] = {
    "draft_steps": count(1, MAX_DRAFT_STEPS),
    "draft_loops": count(1, MAX_LOOPS),
    "up": _share,
    "down": _share,
    "off": _between(0.0, float("inf"), below=True),
    "acceptance": _between(0.0, 1.0, above=True),
}

_EMA: Mapping[str, Reader] = {
    "beta": _between(0.0, 1.0, above=True),
    "interval": count(1),
    "min_feedback": count(1),
}

_RANGE: Mapping[str, Reader] = {
    "min_requests": count(1, MAX_REQUESTS),
    "max_requests": count(1, MAX_REQUESTS),
    "candidates": listing(_record(Candidate, _CANDIDATE, ("draft_steps",)), "candidates"),
    "initial": count(0),
    "initial_off": truth,
    "ema": _record(EmaSettings, _EMA, ()),
}

_DISABLE: Mapping[str, Reader] = {
    "enabled": truth,
    "margin": _between(0.0, 1.0, below=True),
    "checks": count(1),
    "backoff_first": count(1),
    "backoff_cap": count(1),
    "probe_rounds": count(1),
    "probe_share": _between(0.0, 1.0, above=True, below=True),
}

_GOODPUT: Mapping[str, Reader] = {
    "margin": _between(0.0, 1.0, below=True),
    "checks": count(1),
    "interval": count(1),
    "shadow_share": _between(0.0, 1.0, above=True),
    "shadow_burst": count(1),
    "window_flags": count(16),
}

_DOCUMENT: Mapping[str, Reader] = {
    "version": _version,
    "model": _record(ModelFacts, {"name": text, "loops": count(2, MAX_LOOPS + 1)}, ("name",)),
    "provenance": _record(
        Provenance,
        {"kind": choice(("measured", "prior")), "source": text, "created_at": text},
        ("kind", "source"),
    ),
    "ranges": listing(_range, "batch ranges"),
    "ema": _record(EmaSettings, _EMA, ()),
    "disable": _record(DisableSettings, _DISABLE, (), _backoff_mistakes),
    "goodput": _record(GoodputSettings, _GOODPUT, ()),
    "fingerprint": mapping,
}
