"""Policies of one engine in this process as targets of their own, taking turns on it.

Knows how policies are named and exchanged; what they do is the engine's affair.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence

from xspec.core.drafts import DraftTotals
from xspec.errors import ConfigError, XspecError
from xspec_cli.benchlib.hindsight import Contest
from xspec_cli.benchlib.load import Answer, Clock, Target
from xspec_cli.benchlib.prompts import Prompt
from xspec_cli.benchlib.rounds import RoundFigures

ADAPTIVE = ("adaptive", "acceptance_ema", "goodput")
PLAIN = ("plain", "fixed:0")
_NAME = re.compile(r"adaptive|plain|acceptance_ema|goodput|fixed:\d{1,3}([:@]\d{1,3})?")
IDLE_TRIES, IDLE_PAUSE_S = 100, 0.02
"""The last round of a finished request may still be in flight when the next policy wants its turn."""


def check_policies(names: Sequence[str]) -> None:
    """ConfigError for a name that no engine knows, or one given twice."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"--policies={name}: allowed: adaptive (what the engine's flags enable), plain, "
                "fixed:K (draft K, verify all), fixed:K:V (draft K, verify V), fixed:K@d (looped), "
                "acceptance_ema, goodput"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"--policies={','.join(names)}: allowed: different policies")


def contest(names: Sequence[str]) -> Contest:
    """Everything that does not adapt is fixed."""
    fixed = tuple(name for name in names if name not in ADAPTIVE)
    return Contest(tuple(names), fixed, next((name for name in fixed if name in PLAIN), None))


class PolicyTarget:
    """One policy of the engine behind `target`. `use_policy` raises RuntimeError while it is busy."""

    def __init__(self, target: Target, policy: str, use_policy: Callable[[str], None]) -> None:
        self.name = policy
        self._target = target
        self._use_policy = use_policy

    async def begin_turn(self) -> None:
        for _ in range(IDLE_TRIES):
            await asyncio.sleep(IDLE_PAUSE_S)
            try:
                self._use_policy(self.name)
                break
            except RuntimeError:
                continue
        else:
            self._use_policy(self.name)
        await self._target.begin_turn()

    async def ask(self, prompt: Prompt, seed: int, clock: Clock) -> Answer:
        return await self._target.ask(prompt, seed, clock)

    async def draft_totals(self) -> DraftTotals | None:
        return await self._target.draft_totals()

    def round_figures(self, begin_s: float, end_s: float) -> RoundFigures | None:
        return self._target.round_figures(begin_s, end_s)


def policy_targets(target: Target, names: Sequence[str], use_policy: Callable[[str], None]) -> list[Target]:
    """A target per policy; one that the engine cannot run is refused here, before any request."""
    for name in names:
        try:
            use_policy(name)
        except XspecError as error:
            raise ConfigError(f"--policies={name}: {error}") from error
    return [PolicyTarget(target, name, use_policy) for name in names]
