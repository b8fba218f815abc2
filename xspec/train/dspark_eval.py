"""How good a DSpark drafter is on held-out text: acceptance at uniform anchors, and in simulated rollouts.

The two are kept apart by name: rounds of a rollout start where a draft failed, so uniform anchors flatter.
Owns no training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from xspec.errors import ConfigError
from xspec.train.dataset import Captured
from xspec.train.dspark_blocks import Blocks, candidate_anchors, make_blocks
from xspec.train.dspark_model import DSparkModel
from xspec.train.loss import DraftHead
from xspec.train.sts import REGIMES, Rollouts

ANCHORS_AT_ONCE = 48  # their logits over 16 k ids are 16 MB


@dataclass(frozen=True, slots=True)
class Drafted:
    """One sequence, a block drafted at every anchor serving could meet (A of them)."""

    matches: np.ndarray  # [A, B] bool: greedy draft equals the text, the drafter's own tokens before it
    confidence: np.ndarray  # [A, B] fp32 logits of the same drafts
    agreement: np.ndarray  # [A, B] fp32, the text's tokens before it: hit (greedy text) or sum min(q, p)
    supervised: np.ndarray  # [A, B] bool: the text has a token to compare with


@dataclass(slots=True)
class Tally:
    """What the sequences of one regime add up to."""

    width: int
    agreement: np.ndarray = field(init=False)
    slots: np.ndarray = field(init=False)
    accepted: list[int] = field(default_factory=list)
    confidence: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.agreement, self.slots = np.zeros(self.width), np.zeros(self.width)

    def add(self, drafted: Drafted) -> None:
        self.agreement += (drafted.agreement * drafted.supervised).sum(0)
        self.slots += drafted.supervised.sum(0)
        for anchor, accepted in jump(drafted.matches, drafted.supervised):
            self.accepted.append(accepted)
            self.confidence.append(drafted.confidence[anchor])

    @property
    def rollouts(self) -> Rollouts | None:
        """Records for the calibration; every round verifies its whole block. None without a round."""
        if not self.accepted:
            return None
        accepted = np.array(self.accepted, dtype=np.int64)
        return Rollouts(np.stack(self.confidence), accepted, np.full_like(accepted, self.width))

    def figures(self, regime: str) -> dict[str, float]:
        """Named figures: rollout tau counts the token every round gets for free."""
        figures: dict[str, float] = {}
        if self.accepted:
            figures[f"{regime} rollout-tau"] = 1.0 + float(np.mean(self.accepted))
        for slot in np.flatnonzero(self.slots):
            figures[f"{regime} uniform-{slot + 1}"] = float(self.agreement[slot] / self.slots[slot])
        return figures


def jump(matches: np.ndarray, supervised: np.ndarray) -> list[tuple[int, int]]:
    """(anchor index, accepted) of each round from the first anchor on; a round moves on by accepted + 1.

    Rounds whose block runs past the text are left out: how far they would have come is unknown.
    """
    rounds: list[tuple[int, int]] = []
    anchor = 0
    while anchor < len(matches) and supervised[anchor].all():
        accepted = int(np.cumprod(matches[anchor]).sum())
        rounds.append((anchor, accepted))
        anchor += accepted + 1
    return rounds


def evaluate(
    model: DSparkModel, head: DraftHead, embedding: torch.Tensor, sequences: Iterable[Captured]
) -> dict[str, Tally]:
    """Tallies by regime. Call it in eval mode without gradients; `embedding` [V, H]."""
    tallies = {regime: Tally(model.sizes.block) for regime in REGIMES}
    for sequence in sequences:
        if len(candidate_anchors(sequence.tokens.shape[0], sequence.prompt_len)):
            tallies[REGIMES[sequence.sampled]].add(draft_everywhere(model, head, embedding, sequence))
    return tallies


def draft_everywhere(
    model: DSparkModel, head: DraftHead, embedding: torch.Tensor, sequence: Captured
) -> Drafted:
    """Greedy blocks at every anchor of one sequence, as serving would draft them there."""
    length = sequence.tokens.shape[0]
    candidates = candidate_anchors(length, sequence.prompt_len)
    if not candidates:
        raise ConfigError(f"an answer of {length - sequence.prompt_len} tokens has no anchor")
    device = embedding.device
    tokens = sequence.tokens.to(device, torch.int64)
    positions = torch.arange(length, device=device)
    context = model.context_keys_values(model.context(sequence.taps.to(device)), positions)
    parts: list[tuple[torch.Tensor, ...]] = []
    for anchors in torch.arange(candidates.start, candidates.stop).split(ANCHORS_AT_ONCE):
        blocks = make_blocks(tokens, [(0, length)], [anchors], model.sizes.block)
        inputs = model.block_inputs(embedding[tokens[anchors.to(device)]])
        hidden = model.hidden(inputs, context, blocks)
        base = hidden.to(head.rows.dtype) @ head.rows.T
        matches, confidence = _chain(model, head, hidden, base, blocks)
        agreement = _teacher_forced(model, head, hidden, base, blocks, sequence)
        parts.append((matches, confidence, agreement, blocks.supervised.view(matches.shape)))
    return Drafted(*(torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)))


def _chain(
    model: DSparkModel, head: DraftHead, hidden: torch.Tensor, base: torch.Tensor, blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft slot by slot, each on its own predecessor -> (matches, confidence logits) [A, B]."""
    width = blocks.width
    hidden, base = (part.unflatten(0, (-1, width)) for part in (hidden, base))
    labels = blocks.labels.view(-1, width)
    previous = blocks.previous.view(-1, width)[:, 0]
    matches, confidence = [], []
    for slot in range(width):
        embedded = model.markov_head.embed(previous)
        confidence.append(model.confidence_head(hidden[:, slot], embedded))
        bias = model.markov_head.bias(model.markov_head.state(hidden[:, slot], embedded))
        previous = head.ids[(base[:, slot].float() + bias.float()).argmax(-1)]
        matches.append(previous == labels[:, slot])
    supervised = blocks.supervised.view(-1, width)
    return torch.stack(matches, 1) & supervised, torch.stack(confidence, 1).float()


def _teacher_forced(
    model: DSparkModel,
    head: DraftHead,
    hidden: torch.Tensor,
    base: torch.Tensor,
    blocks: Blocks,
    sequence: Captured,
) -> torch.Tensor:
    """[A, B]: whether the best token is the text's, or on sampled text the sum over D of min(q, p)."""
    markov = model.markov_head
    logits = base.float() + markov.bias(markov.state(hidden, markov.embed(blocks.previous))).float()
    if not sequence.sampled:
        return (head.ids[logits.argmax(-1)] == blocks.labels).float().view(-1, blocks.width)
    states = sequence.hidden.to(logits.device)[blocks.rows].to(head.rows.dtype)
    log_z = sequence.log_z.to(logits.device)[blocks.rows]
    p = ((states @ head.rows.T).float() - log_z[:, None]).exp_()
    return torch.minimum(logits.softmax(-1), p).sum(-1).view(-1, blocks.width)
