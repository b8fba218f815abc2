"""What speculation did during a run: counters read before and after it, and the rates between.

Works with any server that has vLLM's four counters, whatever their prefix; knows nothing about HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from xspec.core.drafts import DraftTotals

DRAFTS = "spec_decode_num_drafts_total"
DRAFT_TOKENS = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


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
