"""Training of a small Ouro from scratch: schedule, growing windows, a wind-down that can be moved, the gate.

Step s draws from (seed, s) alone: interrupted and resumed a run ends with the same weights. Until its rate
starts to fall a run does not depend on how long it will be, so its length may still be changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xspec.errors import CheckpointError, ConfigError
from xspec.train.loop import Progress, Report, generator, restore, save
from xspec.train.ouro_corpus import CODE, Corpus
from xspec.train.ouro_eval import device_of, read_windows
from xspec.train.ouro_loss import OBJECTIVES, gate_loss, language_loss
from xspec.train.ouro_model import OuroModel, OuroSizes

LOWEST_RATE = 0.1  # of the highest, at the end
WIND_DOWN = 0.4  # share of the steps in which the rate falls
WATCHED_WINDOWS, WATCHED_TOKENS = 16, 256  # of held-out code, while training


@dataclass(frozen=True, slots=True)
class OuroOptions:
    """`windows`: (tokens, share of the steps), ascending; all but the first come while the rate falls."""

    steps: int
    objective: str = "expected_loss"
    seed: int = 0
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    tokens_per_step: int = 1024
    windows: tuple[tuple[int, float], ...] = ((256, 0.8), (1024, 0.13), (2560, 0.07))
    entropy_weight: float = 0.1
    distill_weight: float = 0.5
    distill_share: float = 0.15  # of the steps, the last ones
    gate_share: float = 0.05  # gate steps after the others, as a share of those
    weight_decay: float = 0.1
    clip: float = 1.0
    bf16: bool = True
    report_every: int = 50
    evaluate_every: int = 500
    save_every: int = 100

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"--objective={self.objective}: allowed: {', '.join(OBJECTIVES)}")
        lengths, shares = zip(*self.windows, strict=True)
        if list(lengths) != sorted(set(lengths)) or lengths[0] < 2 or min(shares) <= 0.0:
            raise ConfigError(f"--windows={self.windows}: allowed: ascending lengths from 2, shares above 0")
        if abs(sum(shares) - 1.0) > 1e-6 or (len(shares) > 1 and shares[0] < 1.0 - WIND_DOWN):
            raise ConfigError(
                f"--windows={self.windows}: allowed: shares that make up 1, the first at least "
                f"{1 - WIND_DOWN:g}"
            )

    @property
    def all_steps(self) -> int:
        """Steps of the language model, then of the gate."""
        return self.steps + max(1, round(self.gate_share * self.steps))

    @property
    def steady_steps(self) -> int:
        """Steps that would be the same in a longer run."""
        return math.floor((1.0 - WIND_DOWN) * self.steps)

    def window(self, step: int) -> int:
        """Tokens of a window in this step. The gate learns on windows like the last ones."""
        until = 0.0
        for length, share in self.windows:
            until += share
            if step < round(until * self.steps):
                return length
        return self.windows[-1][0]

    def rate(self, step: int) -> float:
        """Warm-up, the highest rate, then a cosine to a tenth of it; for the gate's steps once more."""
        first, end = (self.steady_steps, self.steps) if step < self.steps else (self.steps, self.all_steps)
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        done = max(0.0, (step - first) / max(1, end - first))
        falling = LOWEST_RATE + (1.0 - LOWEST_RATE) * 0.5 * (1.0 + math.cos(math.pi * done))
        return self.learning_rate * warm * falling

    def lasting(self) -> dict[str, Any]:
        """What the weights depend on, as JSON takes it: how often to report or save is free to change."""
        values = {name: value for name, value in asdict(self).items() if not name.endswith("_every")}
        return {**values, "windows": [list(window) for window in self.windows]}


def train_ouro(
    corpus: Corpus,
    sizes: OuroSizes,
    options: OuroOptions,
    checkpoint: Path,
    report: Report,
    device: torch.device | None = None,
) -> tuple[OuroModel, int]:
    """Run, or go on with, the training that `checkpoint` holds. The model, and the tokens it saw.

    CheckpointError names what may not change between two parts of a run but did.
    """
    shortest = options.windows[-1][0] + 1
    if len(corpus.training) < shortest:
        raise ConfigError(
            f"--windows: a window needs {shortest} tokens, the corpus has {len(corpus.training)}"
        )
    device = device or torch.device("cpu")
    model = OuroModel(sizes, generator(options.seed, -1)).to(device)
    optimizer = make_optimizer(model, options)
    identity = {"algorithm": "Ouro", "corpus": corpus.digest, **asdict(sizes)}
    run = {**identity, **options.lasting()}
    step, tokens = restore(checkpoint, model, optimizer, _planned(checkpoint, run, options))
    model.train()
    shown_tokens, shown_at = tokens, time.perf_counter()
    while step < options.all_steps:
        batch = draw(corpus.training, options, step).to(device)
        loss, metrics = _step(model, batch, optimizer, options, step)
        tokens += batch.shape[0] * (batch.shape[1] - 1)
        step += 1
        last = step == options.all_steps
        if last or step % options.save_every == 0:
            save(checkpoint, model, optimizer, run, step, tokens)
        evaluates = last or step % options.evaluate_every == 0
        if evaluates or step % options.report_every == 0:
            values = {name: float(value) for name, value in metrics.items()}
            rate = (tokens - shown_tokens) / (time.perf_counter() - shown_at)
            held_out = watch(model, corpus, options) if evaluates else {}
            rates = (options.rate(step - 1), rate)
            report(Progress(step, options.all_steps, float(loss), *rates, values, held_out))
            shown_tokens, shown_at = tokens, time.perf_counter()
    return model, tokens


def make_optimizer(model: OuroModel, options: OuroOptions) -> torch.optim.Optimizer:
    """Matrices decay; embeddings, gains and the gate do not."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        spared = "embed_tokens" in name or "early_exit_gate" in name
        groups[parameter.dim() > 1 and not spared].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": options.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )


def draw(stream: torch.Tensor, options: OuroOptions, step: int) -> torch.Tensor:
    """[B, T + 1] windows of step `step`, anywhere in the stream."""
    window = options.window(step)
    lanes = max(1, options.tokens_per_step // window)
    chosen = generator(options.seed, step)
    starts = torch.randint(len(stream) - window, (lanes,), generator=chosen).tolist()
    return torch.stack([stream[start : start + window + 1] for start in starts])


def watch(model: OuroModel, corpus: Corpus, options: OuroOptions) -> dict[str, float]:
    """On held-out code: bits per byte after each loop, and how often its head picks what the last does."""
    windows = corpus.windows(CODE, WATCHED_WINDOWS, min(WATCHED_TOKENS, options.windows[0][0]))
    windows = windows.to(device_of(model))
    model.eval()
    with torch.no_grad(), torch.autocast(windows.device.type, torch.bfloat16, enabled=options.bf16):
        figures = read_windows(model, windows, corpus.byte_counts())
    model.train()
    bits = {f"bits{loop + 1}": value for loop, value in enumerate(figures.bits_per_byte)}
    return {**bits, **{f"match{loop + 1}": value for loop, value in enumerate(figures.matches)}}


def _planned(checkpoint: Path, run: dict[str, Any], options: OuroOptions) -> Mapping[str, Any]:
    """`run` with the steps the checkpoint was made with, where both plans are the same up to where it is."""
    if not checkpoint.exists():
        return run
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        step, before = int(state["step"]), int(state["run"]["steps"])
    except Exception as error:  # torch raises whatever its unpickler meets
        raise CheckpointError(f"{checkpoint} is not a training checkpoint: {error}") from None
    if before == options.steps:
        return run
    if step > replace(options, steps=before).steady_steps:
        raise ConfigError(
            f"--steps={options.steps}: {checkpoint} has begun to wind down for --steps={before}, the only "
            "number that is allowed now"
        )
    if step > options.steady_steps:
        least = math.ceil(step / (1.0 - WIND_DOWN))
        raise ConfigError(
            f"--steps={options.steps}: {checkpoint} has done {step}; allowed: {before}, or from {least}"
        )
    return {**run, "steps": before}


def _step(
    model: OuroModel, batch: torch.Tensor, optimizer: torch.optim.Optimizer, options: OuroOptions, step: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    for group in optimizer.param_groups:
        group["lr"] = options.rate(step)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=options.bf16):
        if step >= options.steps:
            loss, metrics = gate_loss(model, batch)
        else:
            distils = step >= (1.0 - options.distill_share) * options.steps
            loss, metrics = language_loss(
                model,
                batch,
                options.objective,
                entropy_weight=options.entropy_weight,
                distill_weight=options.distill_weight if distils else 0.0,
            )
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    if not torch.isfinite(norm):
        raise CheckpointError(f"the gradient of step {step} is not finite: try a lower --learning_rate")
    optimizer.step()
    return loss.detach(), metrics
