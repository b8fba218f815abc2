"""What speculation did during a run: counters read before and after it, and the rates between.

Works with any server that has vLLM's four counters, whatever their prefix; knows nothing about HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xspec.core.drafts import DraftCounts, DraftTotals

DRAFTS = "spec_decode_num_drafts_total"
DRAFT_TOKENS = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True)
class AnswerDrafts:
    """One answer. `rounds` yielded `tokens` after the prompt's own; `drafts` of them had drafts."""

    rounds: int
    tokens: int
    drafts: int
    proposed: int
    accepted: int
    verified: int | None = None  # None: the target does not tell


def answer_drafts(rounds: Sequence[tuple[int, DraftCounts | None]]) -> AnswerDrafts:
    """Of (tokens, drafts) of each round behind the prompt's own."""
    drafted = [drafts for _, drafts in rounds if drafts is not None]
    return AnswerDrafts(
        rounds=len(rounds),
        tokens=sum(tokens for tokens, _ in rounds),
        drafts=len(drafted),
        proposed=sum(drafts.proposed for drafts in drafted),
        accepted=sum(drafts.accepted for drafts in drafted),
        verified=sum(drafts.verified for drafts in drafted),
    )


def told_drafts(metrics: object, completion_tokens: int) -> AnswerDrafts | None:
    """From the `metrics` of a response in vLLM's shape; None where it says nothing of drafts.

    Every round adds the target's own token to what was accepted: what drafts do not explain is plain rounds.
    """
    found = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(found, dict):
        return None
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    counts = [count for name in names if isinstance(count := found.get(name), int) and count >= 0]
    if len(counts) < len(names):
        return None
    drafts, proposed, accepted = counts
    tokens = max(0, completion_tokens - 1)
    return AnswerDrafts(max(drafts, tokens - accepted), tokens, drafts, proposed, accepted)


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """One run. Rates by position: of all drafts, and of those accepted up to the position before."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    mean_acceptance_length: float
    acceptance_rate: float
    position_rates: tuple[float, ...]
    conditional_rates: tuple[float | None, ...]  # None: no draft was accepted so far


def speculation_figures(before: DraftTotals | None, after: DraftTotals | None) -> SpeculationFigures | None:
    """Figures of what happened in between; None for a target that does not speculate, or did not."""
    if before is None or after is None:
        return None
    found = after.since(before)
    length, rate = found.mean_acceptance_length, found.acceptance_rate
    if length is None or rate is None or found.drafts < 0:  # a server that restarted counts from 0 again
        return None
    return SpeculationFigures(
        drafts=found.drafts,
        draft_tokens=found.draft_tokens,
        accepted_tokens=found.accepted_tokens,
        mean_acceptance_length=length,
        acceptance_rate=rate,
        position_rates=found.position_rates,
        conditional_rates=found.conditional_rates,
    )


def read_draft_totals(exposition: str) -> DraftTotals | None:
    """The counters in a Prometheus text, summed over other labels; None where they are not in it.

    ValueError, KeyError or OverflowError when the text is no such exposition.
    """
    from prometheus_client.parser import text_string_to_metric_families

    counts: dict[str, int] = {}
    by_position: dict[int, int] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            name = sample.name.rpartition(":")[2]
            if name == PER_POSITION:
                position = int(sample.labels["position"])
                by_position[position] = by_position.get(position, 0) + int(sample.value)
            elif name in (DRAFTS, DRAFT_TOKENS, ACCEPTED):
                counts[name] = counts.get(name, 0) + int(sample.value)
    if len(counts) < 3:
        return None
    per_position: list[int] = []
    while len(per_position) in by_position:
        per_position.append(by_position[len(per_position)])
    return DraftTotals(counts[DRAFTS], counts[DRAFT_TOKENS], counts[ACCEPTED], tuple(per_position))
