"""How well each loop of an Ouro foretells the last one: on given text, and by replaying its own answers.

One pass over an answer gives for every depth d the tokens its head would have drafted; what any (K, d) would
have accepted follows by counting. Knows no engine: the engine's counters must come out the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from xspec.calib.replay import Counted
from xspec.calib.replay import replay as replay_rounds
from xspec.train.ouro_loss import exit_log_probabilities
from xspec.train.ouro_model import Cache, OuroModel

TOKENS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Reading:
    """Of given text, after each loop: bits a byte, and how often its head picks what the last does."""

    bits_per_byte: tuple[float, ...]
    matches: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cell(Counted):
    """Counters of all rounds of some answers with K = `draft_steps` drafts of depth d."""

    draft_steps: int
    depth: int

    def speedup(self, loops: int) -> float:
        """Where a loop costs the same for any rows, and nothing else does: D (1 + K alpha) / (D + d K)."""
        return loops * self.tokens_per_round / (loops + self.depth * self.draft_steps)


@dataclass(frozen=True, slots=True)
class Exits:
    """What it saves and costs to stop at the first loop whose cumulative probability reaches `threshold`."""

    threshold: float
    loops: float  # mean loops run
    bits_per_byte: float


def device_of(model: OuroModel) -> torch.device:
    return model.lm_head.weight.device


def read_windows(model: OuroModel, windows: torch.Tensor, byte_counts: torch.Tensor) -> Reading:
    """windows [B, T] of given tokens; like all of these called in eval mode without gradients."""
    nats = torch.zeros(model.sizes.loops, dtype=torch.float64)
    hits = torch.zeros(model.sizes.loops, dtype=torch.float64)
    for part in _portions(windows):
        labels = part[:, 1:].flatten()
        logits = [model.logits(state).float().flatten(0, 1) for state in model.states(part[:, :-1])]
        last = logits[-1].argmax(-1)
        for loop, each in enumerate(logits):
            nats[loop] += float(F.cross_entropy(each, labels, reduction="sum"))
            hits[loop] += int((each.argmax(-1) == last).sum())
    bits = nats / _bits(windows, byte_counts)
    rows = windows.shape[0] * (windows.shape[1] - 1)
    return Reading(tuple(bits.tolist()), tuple((hits / rows).tolist()))


def read_exits(
    model: OuroModel, windows: torch.Tensor, byte_counts: torch.Tensor, thresholds: Sequence[float]
) -> list[Exits]:
    """Early exit (Ouro's Q-exit) on given text, one result a threshold."""
    loops = torch.zeros(len(thresholds), dtype=torch.float64)
    nats = torch.zeros(len(thresholds), dtype=torch.float64)
    for part in _portions(windows):
        labels = part[:, 1:].flatten()
        states = model.states(part[:, :-1])
        losses = torch.stack(
            [F.cross_entropy(model.logits(s).float().flatten(0, 1), labels, reduction="none") for s in states]
        )
        reached = exit_log_probabilities(model.exits(states).flatten(0, 1).t()).exp().cumsum(0)
        for index, threshold in enumerate(thresholds):
            stops = (reached[:-1] < threshold).sum(0)  # the last loop always stops
            loops[index] += int((stops + 1).sum())
            nats[index] += float(losses.gather(0, stops[None]).sum())
    rows = windows.shape[0] * (windows.shape[1] - 1)
    bits = nats / _bits(windows, byte_counts)
    return [Exits(t, float(n / rows), float(b)) for t, n, b in zip(thresholds, loops, bits, strict=True)]


def greedy(model: OuroModel, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
    """prompts [B, T] -> greedy answers [B, tokens]; the end token is one like any other."""
    cache = Cache(model.sizes, prompts.shape[0], prompts.shape[1] + tokens)
    fed, found = prompts, []
    for _ in range(tokens):
        state = model.states(fed, cache)[-1][:, -1]
        found.append(model.logits(state).argmax(-1))
        fed = found[-1][:, None]
    return torch.stack(found, dim=1)


def match_flags(model: OuroModel, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """[B, D - 1, n - 1] bool: after the answer's token i, would depth d have drafted its token i + 1?

    The first token of an answer comes from the prompt's rows, which nothing drafts.
    """
    first, found = prompts.shape[1], []
    for part in _portions(torch.cat((prompts, answers), dim=1)):
        states = model.states(part[:, :-1])[:-1]
        picks = torch.stack([model.logits(state[:, first:]).argmax(-1) for state in states], dim=1)
        found.append(picks == part[:, None, first + 1 :])
    return torch.cat(found)


def replay(flags: torch.Tensor, draft_steps: int, depth: int) -> Cell:
    """What rounds of K drafts of depth d would have counted on these flags [B, D - 1, n - 1]."""
    counted = replay_rounds(list(flags[:, depth - 1].cpu().numpy()), draft_steps)
    return Cell(counted.rounds, counted.proposed, counted.accepted, counted.committed, draft_steps, depth)


def distinct(answers: torch.Tensor, size: int = 4) -> float:
    """Share of the `size`-grams of an answer that are new in it: low where a model goes round in circles."""
    grams = answers.unfold(1, size, 1)
    return sum(len(set(map(tuple, each.tolist()))) for each in grams) / (grams.shape[0] * grams.shape[1])


def _portions(windows: torch.Tensor) -> Sequence[torch.Tensor]:
    """Few enough rows at once that logits fit into any memory."""
    return windows.split(max(1, TOKENS_AT_ONCE // windows.shape[1]))


def _bits(windows: torch.Tensor, byte_counts: torch.Tensor) -> float:
    """Nats a bit, times the bytes of all labels."""
    return float(byte_counts[windows[:, 1:].flatten().cpu()].sum()) * float(torch.tensor(2.0).log())
