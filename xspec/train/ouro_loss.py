"""What an Ouro learns from: the loss after every loop, weighed by where its gate would stop.

Formulas are of the Ouro paper (arXiv 2510.25741), training stages I and II; shapes are [loops, tokens].
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from xspec.train.ouro_model import OuroModel

EXPECTED, LAST_LOOP = "expected_loss", "last_loop"
OBJECTIVES = (EXPECTED, LAST_LOOP)
GATE_SLOPE, GATE_THRESHOLD = 50.0, 0.005  # nats of improvement below which going on is not worth it


def language_loss(
    model: OuroModel, tokens: torch.Tensor, objective: str, *, entropy_weight: float, distill_weight: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The scalar of stage I over windows [B, T + 1], and the cross entropy in nats after each loop to show.

    expected_loss: sum_t p_t CE_t - w H(p), p being each token's exit distribution. `distill_weight` adds what
    speculation needs: CE_D, for the last head is what is served, and the mean cross entropy of early heads
    with what that one would pick, which is what accepts a draft.
    last_loop: CE_D alone, the control whose early states no head can read.
    """
    inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()
    states = model.states(inputs)
    if objective == LAST_LOOP:
        loss = F.cross_entropy(_logits(model, states[-1]), labels)
        return loss, {f"ce{len(states)}": loss.detach()}
    logits = [_logits(model, state) for state in states]
    losses = torch.stack([F.cross_entropy(each, labels, reduction="none") for each in logits])
    log_p = exit_log_probabilities(model.exits(states).flatten(0, 1).t())
    p = log_p.exp()
    loss = (p * losses).sum(0).mean() + entropy_weight * (p * log_p).sum(0).mean()
    if distill_weight:
        picks = logits[-1].detach().argmax(-1)
        early = torch.stack([F.cross_entropy(each, picks) for each in logits[:-1]])
        loss = loss + distill_weight * (losses[-1].mean() + early.mean())
    shown = {f"ce{loop + 1}": value for loop, value in enumerate(losses.detach().mean(1))}
    loops = torch.arange(1, len(states) + 1, device=p.device)
    return loss, {**shown, "exit": (p.detach().mean(1) * loops).sum()}


def gate_loss(model: OuroModel, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The scalar of stage II: the gate after loop t stops where loop t + 1 improves the loss too little.

    The target to go on is sigmoid(50 (max(0, CE_t - CE_t+1) - 0.005)). Only the gate gets gradients.
    """
    with torch.no_grad():
        labels = tokens[:, 1:].flatten()
        states = model.states(tokens[:, :-1])
        losses = torch.stack(
            [F.cross_entropy(_logits(model, state), labels, reduction="none") for state in states]
        )
        gained = (losses[:-1] - losses[1:]).clamp(min=0.0)
        stop = 1.0 - torch.sigmoid(GATE_SLOPE * (gained - GATE_THRESHOLD))
    logits = model.exits(states).flatten(0, 1).t()
    loss = F.binary_cross_entropy_with_logits(logits, stop)
    return loss, {"stop": logits.detach().sigmoid().mean(), "should": stop.mean()}


def exit_log_probabilities(gates: torch.Tensor) -> torch.Tensor:
    """Gates [D - 1, N] -> log p [D, N]: p_t = lambda_t prod_{j<t} (1 - lambda_j), the last has the rest."""
    stays = F.logsigmoid(-gates).cumsum(0)
    before = torch.cat((torch.zeros_like(stays[:1]), stays))  # [D, N]: log of having got to loop t
    return torch.cat((before[:-1] + F.logsigmoid(gates), before[-1:]))


def _logits(model: OuroModel, state: torch.Tensor) -> torch.Tensor:
    return model.logits(state).float().flatten(0, 1)
