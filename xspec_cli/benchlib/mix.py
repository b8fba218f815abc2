"""Mixed traffic: prompts of several files in given shares, and what each class of them got.

The mix is a list like any other, so every load and target can be asked for it. No chance is involved: each
prefix of it holds every class as often as its share says, give or take one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xspec.errors import ConfigError
from xspec.setting import Kind
from xspec_cli.benchlib.plan import Run
from xspec_cli.benchlib.prompts import Prompt, load_prompts
from xspec_cli.gflags import parse_value

MAX_TEMPERATURE = 100.0
MAX_MIXED_PROMPTS = 50_000
_PART = re.compile(r"(?P<path>.+?):(?P<share>[^:/]+)(?::(?P<temperature>[^:/]+))?")


@dataclass(frozen=True, slots=True)
class Part:
    """One class of traffic. `share` is of all requests; `temperature` None: that of the run."""

    name: str
    path: str
    share: float
    temperature: float | None = None


def parse_mix(words: Sequence[str]) -> tuple[Part, ...]:
    """Parts written as file:weight or file:weight:temperature; ConfigError names the one that is wrong."""
    parts = [_part(word) for word in words]
    names = [part.name for part in parts]
    twice = {name for name in names if names.count(name) > 1}
    parts = [_renamed(part) if part.name in twice else part for part in parts]
    if len({part.name for part in parts}) < len(parts):
        raise ConfigError(f"--mix={','.join(words)}: allowed: files of different names or temperatures")
    total = sum(part.share for part in parts)
    return tuple(Part(part.name, part.path, part.share / total, part.temperature) for part in parts)


def _part(word: str) -> Part:
    match = _PART.fullmatch(word)
    share = parse_value(Kind.DOUBLE, match["share"]) if match else None
    hot = match["temperature"] if match else None
    temperature = None if hot is None else parse_value(Kind.DOUBLE, hot)
    good_share = isinstance(share, float) and 1e-3 <= share <= 1e6
    good_heat = hot is None or (isinstance(temperature, float) and 0.0 <= temperature <= MAX_TEMPERATURE)
    if match is None or not good_share or not good_heat:
        raise ConfigError(
            f"--mix={word}: allowed: file:weight or file:weight:temperature, as in easy.jsonl:0.5:0 "
            f"(weights from 0.001 to 1000000, temperatures from 0 to {MAX_TEMPERATURE:g})"
        )
    path = match["path"]
    return Part(Path(path).stem, path, float(match["share"]), None if hot is None else float(hot))


def _renamed(part: Part) -> Part:
    shown = "" if part.temperature is None else f"@{part.temperature:g}"
    return Part(part.name + shown, part.path, part.share, part.temperature)


def load_mix(parts: Sequence[Part], *, chat: bool) -> list[Prompt]:
    """The mixed prompts, long enough to hold every file once (or as much as MAX_MIXED_PROMPTS lets)."""
    files = [load_prompts(part.path, chat=chat, flag="mix") for part in parts]
    length = max(round(len(found) / part.share + 0.5) for found, part in zip(files, parts, strict=True))
    given = [0] * len(parts)
    mixed = []
    for place in range(min(length, MAX_MIXED_PROMPTS)):
        behind = [part.share * (place + 1) - count for part, count in zip(parts, given, strict=True)]
        index = behind.index(max(behind))
        part, prompt = parts[index], files[index][given[index] % len(files[index])]
        given[index] += 1
        mixed.append(Prompt(prompt.text, prompt.messages, part.name, part.temperature))
    return mixed


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One class of traffic in one or more runs.

    `verified_a_round`: drafts verified for one of its requests in a round (the target computes one row more);
    None where the target does not tell. `acceptance` is of the verified drafts, else of the proposed ones.
    """

    traffic: str
    completed: int
    failed: int
    tokens: float
    tokens_per_s: float
    tokens_a_round: float | None
    acceptance: float | None
    verified_a_round: float | None


def class_figures(runs: Sequence[Run]) -> list[ClassFigures]:
    """Figures by class, in order of appearance, over runs of one policy at one level."""
    return [_class(name, runs) for name in dict.fromkeys(s.traffic for run in runs for s in run.samples)]


def _class(name: str, runs: Sequence[Run]) -> ClassFigures:
    mine = [sample for run in runs for sample in run.samples if sample.traffic == name]
    tokens = sum(
        sample.tokens_within(float("-inf"), run.seconds if run.phases else float("inf"))
        for run in runs
        for sample in run.samples
        if sample.traffic == name
    )
    seconds = sum(run.seconds for run in runs)
    told = [(sample, sample.drafts) for sample in mine if sample.ok and sample.drafts is not None]
    rounds = sum(drafts.rounds for _, drafts in told)
    counts = [drafts.verified for _, drafts in told if drafts.verified is not None]
    verified = sum(counts) if told and len(counts) == len(told) else None
    judged = sum(drafts.proposed for _, drafts in told) if verified is None else verified
    return ClassFigures(
        traffic=name,
        completed=sum(sample.ok for sample in mine),
        failed=sum(not sample.ok for sample in mine),
        tokens=tokens,
        tokens_per_s=tokens / seconds if seconds > 0.0 else 0.0,
        tokens_a_round=sum(drafts.tokens for _, drafts in told) / rounds if rounds else None,
        acceptance=sum(drafts.accepted for _, drafts in told) / judged if judged else None,
        verified_a_round=verified / rounds if verified is not None and rounds else None,
    )
