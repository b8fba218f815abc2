"""The training loop all drafters share: schedule, optimiser, batches, checkpoints, progress.

A run is a number of steps, never a time, and each step draws from (seed, step) alone: interrupted and resumed
it ends with the same weights. Knows no drafter and no loss.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from xspec.errors import CheckpointError
from xspec.train.dataset import Batch, Reader, pack


@dataclass(frozen=True, slots=True)
class LoopOptions:
    steps: int
    seed: int = 0
    sequences_per_step: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 30
    clip: float = 1.0
    bf16: bool = True  # autocast; the master weights stay fp32
    report_every: int = 25
    evaluate_every: int = 500
    save_every: int = 250


@dataclass(frozen=True, slots=True)
class Progress:
    """`step` steps are done. `held_out` is filled by steps that evaluated."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    held_out: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"step {self.step}/{self.steps}  loss {self.loss:.4f}  {self.tokens_per_s:.0f} tokens/s"
        for title, values in (("", self.metrics), ("held out: ", self.held_out)):
            if values:
                text += f"  {title}" + " ".join(f"{name} {value:.3f}" for name, value in values.items())
        return text


Report = Callable[[Progress], None]


class Trainer(Protocol):
    """A drafter in training. All trained weights are parameters of `module`."""

    @property
    def module(self) -> nn.Module: ...

    def loss(self, batch: Batch, progress: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Scalar to minimise, and scalars to show, after `progress` (0 to 1) of the run.

        Random choices come from `batch.generator` only.
        """

    def evaluate(self, reader: Reader) -> dict[str, float]:
        """Figures over held-out sequences, by name; the module is in eval mode without gradients."""


def batch_indices(count: int, per_step: int, seed: int, step: int) -> list[int]:
    """Which of `count` sequences step `step` sees: each once before any a second time."""
    places = range(step * per_step, (step + 1) * per_step)
    orders = {
        epoch: torch.randperm(count, generator=generator(seed, 2 * epoch)).tolist()
        for epoch in {place // count for place in places}
    }
    return [orders[place // count][place % count] for place in places]


def generator(seed: int, index: int) -> torch.Generator:
    """A random source on the CPU for use `index` of a run."""
    # Multiplied by odd constants and mixed by torch's own seeding: neighbours share nothing.
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03) % 2**63)


def learning_rate(options: LoopOptions, step: int) -> float:
    """Linear warm-up, then a cosine to 0 at the end of the run."""
    warm = min(1.0, (step + 1) / max(1, options.warmup_steps))
    return options.learning_rate * warm * 0.5 * (1.0 + math.cos(math.pi * step / options.steps))


def train(
    trainer: Trainer,
    reader: Reader,
    options: LoopOptions,
    checkpoint: Path,
    identity: Mapping[str, Any],
    device: torch.device,
    report: Report,
) -> int:
    """Run, or go on with, the training that `checkpoint` holds. Returns the tokens seen by this run's steps.

    `identity` is what must not change between the parts of a run; CheckpointError names what did.
    """
    if not reader.training:
        raise CheckpointError("the dataset has no training sequences: all of it is held out, or it is empty")
    module = trainer.module
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    run = {**identity, **_lasting(options), "dataset": asdict(reader.spec)}
    step, tokens = restore(checkpoint, module, optimizer, run)
    module.train()
    shown_tokens, shown_at = tokens, time.perf_counter()
    while step < options.steps:
        batch = _batch(reader, options, step, device)
        loss, metrics = _step(trainer, batch, optimizer, options, step)
        tokens += batch.tokens.shape[0]
        step += 1
        last = step == options.steps
        if last or step % options.save_every == 0:
            save(checkpoint, module, optimizer, run, step, tokens)
        evaluates = last or step % options.evaluate_every == 0
        if evaluates or step % options.report_every == 0:
            values = {name: float(value) for name, value in metrics.items()}
            rate = (tokens - shown_tokens) / (time.perf_counter() - shown_at)
            held_out = evaluate(trainer, reader, options, device) if evaluates and reader.held_out else {}
            rates = (learning_rate(options, step - 1), rate)
            report(Progress(step, options.steps, float(loss), *rates, values, held_out))
            shown_tokens, shown_at = tokens, time.perf_counter()
    return tokens


def evaluate(
    trainer: Trainer, reader: Reader, options: LoopOptions, device: torch.device
) -> dict[str, float]:
    trainer.module.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
        figures = trainer.evaluate(reader)
    trainer.module.train()
    return figures


def save(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    step: int,
    tokens: int,
) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        state = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "run": dict(run), "step": step, "tokens": tokens}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def restore(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, run: Mapping[str, Any]
) -> tuple[int, int]:
    """Steps done and tokens seen so far; (0, 0) and nothing touched if there is no checkpoint."""
    if not path.exists():
        return 0, 0
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        before = state["run"]
    except Exception as error:  # torch raises whatever its unpickler meets
        raise CheckpointError(f"{path} is not a training checkpoint: {error}") from None
    wrong = [
        f"{name} was {before.get(name)!r}, now {run.get(name)!r}"
        for name in sorted({*before, *run})
        if before.get(name) != run.get(name)
    ]
    if wrong:
        raise CheckpointError(f"{path} belongs to another run: {'; '.join(wrong)}")
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]), int(state["tokens"])


def _lasting(options: LoopOptions) -> dict[str, Any]:
    """The options a result depends on: how often to report or save is free to change."""
    return {name: value for name, value in asdict(options).items() if not name.endswith("_every")}


def _batch(reader: Reader, options: LoopOptions, step: int, device: torch.device) -> Batch:
    count = len(reader.training)
    indices = batch_indices(count, options.sequences_per_step, options.seed, step)
    sequences = [reader.sequence(reader.training[index]) for index in indices]
    return pack(sequences, generator(options.seed, 2 * step + 1), device)


def _step(
    trainer: Trainer, batch: Batch, optimizer: torch.optim.Optimizer, options: LoopOptions, step: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(options, step)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=options.bf16):
        loss, metrics = trainer.loss(batch, step / options.steps)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(trainer.module.parameters(), options.clip)
    if not torch.isfinite(norm):
        raise CheckpointError(f"the gradient of step {step} is not finite: the dataset's states are damaged")
    optimizer.step()
    return loss.detach(), metrics
