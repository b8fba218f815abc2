"""How good a drafter is in real rollouts: our own engine drafts, verifies and counts, as serving does.

Figures at uniform anchors flatter, since rounds start where the last draft failed; here none are taken. Also
makes the rounds that a confidence calibration is fitted on. Owns no training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from xspec.config import Config
from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.draft.base import Drafter
from xspec.draft.choose import DraftChoice, choose_drafter
from xspec.draft.dspark import DSparkDrafter
from xspec.errors import ConfigError
from xspec.exec.assemble import MakeDrafter, Speculation, check_abilities, make_drafter
from xspec.models.base import Target
from xspec.models.locate import locate_model
from xspec.platform.base import Platform
from xspec.platform.select import select_platform
from xspec.policy.base import PolicyView
from xspec.policy.fixed import FixedPolicy
from xspec.progress import Progress, silent
from xspec.train.figures import Figures
from xspec.train.offline import Ask, OfflineEngine
from xspec.train.sts import REGIMES, Calibration, Rollouts, calibrate
from xspec.train.target import TargetFiles, read_target

TEMPERATURES = (0.0, 1.0)
SATURATED = 1e-6
"""Confidences are read back as probabilities: nearer than this to 0 or 1 a logit cannot be told."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    name: str
    prompts: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Recorder:
    """A Policy: the same steps and width every round; keeps what became of every draft."""

    steps: int
    verify: int
    name: str = "fixed"
    accepted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    signals: list[np.ndarray] = field(default_factory=list)
    _fixed: FixedPolicy = field(init=False)

    def __post_init__(self) -> None:
        self._fixed = FixedPolicy(self.steps, self.verify)

    def plan(self, view: PolicyView) -> SpeculationPlan:
        return self._fixed.plan(view)

    def observe(self, feedback: RoundFeedback) -> None:
        if feedback.signals is None:
            return
        for row, signals in zip(feedback.rows, feedback.signals, strict=True):
            if row.proposed:  # 0: the sequence had room for the target's own token only
                self.accepted.append(row.accepted)
                self.verified.append(row.verified)
                self.signals.append(signals)

    def status(self) -> dict[str, Any]:
        return self._fixed.status()

    def clear(self) -> None:
        self.accepted, self.verified, self.signals = [], [], []

    def figures(self, prompts: str, temperature: float, answers: Sequence[tuple[int, ...]]) -> Figures:
        accepted, verified = np.array(self.accepted, dtype=np.int64), np.array(self.verified, dtype=np.int64)
        rounds = len(accepted)
        return Figures(
            prompts=prompts,
            temperature=temperature,
            sequences=len(answers),
            answer_tokens=sum(len(answer) for answer in answers),
            rounds=rounds,
            mean_accepted_length=1.0 + float(accepted.mean()) if rounds else None,
            acceptance=tuple(_conditional(accepted, verified, place) for place in range(self.verify)),
        )

    def rollouts(self) -> Rollouts | None:
        """Records for a calibration; None without a round."""
        if not self.signals:
            return None
        confidence = np.stack(self.signals).astype(np.float64).clip(SATURATED, 1.0 - SATURATED)
        logits = np.log(confidence) - np.log1p(-confidence)
        return Rollouts(logits, np.array(self.accepted), np.array(self.verified))


def _conditional(accepted: np.ndarray, verified: np.ndarray, place: int) -> float | None:
    asked = (verified > place) & (accepted >= place)
    return float((accepted[asked] > place).mean()) if asked.any() else None


def choose_evaluated(config: Config) -> DraftChoice:
    """The drafter that `config` means; ConfigError if it means none."""
    model = locate_model(config.model.model or None)
    choice = choose_drafter(config.speculation, embedded=not config.model.model, model=model)
    if choice is None:
        raise ConfigError("there is no drafter to evaluate: give --draft_model=DIR")
    if not choice.verify:
        raise ConfigError("--target_verify_width=0 verifies no draft: there is nothing to evaluate")
    return choice


def evaluate_drafter(
    config: Config,
    prompts: Sequence[PromptSet],
    *,
    max_tokens: int,
    temperatures: Sequence[float] = TEMPERATURES,
    seed: int = 0,
    known: Collection[tuple[str, float]] = (),
    progress: Progress = silent,
) -> Iterator[Figures]:
    """Real rollouts of the drafter that `config` means, as `xspec serve` with these flags would run it.

    Every prompt is answered by up to `max_tokens` tokens at each temperature; figures come one by one, a set
    after the other. `known`: (set, temperature) to leave out.
    """
    choice = choose_evaluated(config)
    wanted = [
        (chosen, heat) for chosen in prompts for heat in temperatures if (chosen.name, heat) not in known
    ]
    if not wanted:
        return
    target = read_target(config.model.model)
    platform = select_platform(config.execution.device, config.execution.cpu_kernels)
    recorder = Recorder(choice.steps, choice.verify)
    drafter_of = partial(make_drafter, config, platform, target.path, choice)
    engine = open_rollouts(config, platform, target, recorder, drafter_of, progress)
    for chosen, temperature in wanted:
        answers = _rollout(engine, recorder, chosen, temperature, max_tokens, seed, progress)
        yield recorder.figures(chosen.name, temperature, answers)


def calibrate_dspark(
    config: Config,
    drafter: Path,
    block: int,
    prompts: PromptSet,
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    progress: Progress,
) -> dict[str, Calibration]:
    """Per regime a table fitted on the raw confidences of full-width rollouts, `temperature` the sampled one.

    A regime without a single round has none.
    """
    target = read_target(config.model.model)
    platform = select_platform(config.execution.device, config.execution.cpu_kernels)
    dtype = check_abilities(config, platform)

    def raw_drafter(model: Target) -> Drafter:
        return DSparkDrafter.load(
            drafter,
            target=model,
            kernels=platform.kernels(),
            dtype=dtype,
            device=platform.device(),
            steps=block,
            regime=None,
        )

    recorder = Recorder(block, block)
    engine = open_rollouts(config, platform, target, recorder, raw_drafter, progress)
    tables = {}
    for regime, heat in zip(REGIMES, (0.0, temperature), strict=True):
        _rollout(engine, recorder, prompts, heat, max_tokens, seed, progress)
        if (rollouts := recorder.rollouts()) is not None:
            tables[regime] = calibrate(rollouts)
    return tables


def open_rollouts(
    config: Config,
    platform: Platform,
    target: TargetFiles,
    recorder: Recorder,
    make_drafter: MakeDrafter,
    progress: Progress,
) -> OfflineEngine:
    """One round in flight: then feedback and signals of a round name the same rows."""
    scheduler = dataclasses.replace(config.scheduler, enable_schedule_overlap=False)
    return OfflineEngine(
        dataclasses.replace(config, scheduler=scheduler),
        platform,
        target.path,
        make_drafter=make_drafter,
        policy=recorder,
        speculation=Speculation((recorder.steps,), (recorder.verify,)),
        stop_ids=target.text.eos_ids,
        progress=progress,
    )


def _rollout(
    engine: OfflineEngine,
    recorder: Recorder,
    chosen: PromptSet,
    temperature: float,
    max_tokens: int,
    seed: int,
    progress: Progress,
) -> list[tuple[int, ...]]:
    """Answer the whole set from a fresh record."""
    recorder.clear()
    stage = f"{chosen.name}, {'greedy' if temperature == 0.0 else f'temperature {temperature:g}'}"
    asks = [Ask(ids, max_tokens, temperature, seed + index) for index, ids in enumerate(chosen.prompts)]
    progress(stage, 0, len(asks))
    return engine.answer(asks, lambda complete, _: progress(stage, complete, len(asks)))
