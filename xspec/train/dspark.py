"""Training of a DSpark drafter: random blocks on captured answers, then calibration on held-out rollouts.

Owns the options, the loss and the order of things; model, blocks, evaluation and export lie beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from xspec.errors import ConfigError
from xspec.train.dataset import Batch, Captured, Reader, choose_draft_vocab, count_answer_tokens
from xspec.train.dspark_blocks import Blocks, draw_anchors, make_blocks
from xspec.train.dspark_eval import Tally, evaluate
from xspec.train.dspark_export import Origin, export
from xspec.train.dspark_heads import MARKOV_HEADS
from xspec.train.dspark_model import DSparkModel, DSparkSizes
from xspec.train.layers import LayerSizes, TargetWeights
from xspec.train.loop import LoopOptions, Report, generator, train
from xspec.train.loss import DraftHead, Taught, Teaching, cross_entropy_weight, draft_head, teach
from xspec.train.sts import Calibration, calibrate

CHECKPOINT = "training.pt"
SLOT_DECAY = 4.0  # slot k, counted from 0, weighs exp(-k / 4): later ones are reached less often


@dataclass(frozen=True, slots=True)
class DSparkOptions:
    """`target_layers` is the depth of the target; `taps` count residual streams, i being after i layers."""

    loop: LoopOptions
    target_layers: int
    taps: tuple[int, ...] | None = None  # None: all the dataset has
    draft_vocab_size: int = 16384
    always_ids: tuple[int, ...] = ()  # in the draft vocabulary whatever their count: end and special tokens
    layers: int = 2
    inner_size: int | None = None  # of a layer's MLP; None: the target's own
    block_size: int = 5
    markov_rank: int = 32
    markov_head: str = "vanilla"
    anchors: int = 32  # blocks a training step takes from each sequence
    confidence_weight: float = 0.5
    soft_labels: bool = True  # cross entropy with the target's distribution; else with the answer's token
    evaluate_sequences: int = 48  # of the held-out ones, while training; the calibration uses all

    def __post_init__(self) -> None:
        for name in (
            "target_layers", "draft_vocab_size", "layers", "block_size", "markov_rank", "anchors",
            "evaluate_sequences",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, allowed: 1 or more")
        if self.inner_size is not None and self.inner_size < 1:
            raise ConfigError(f"inner_size is {self.inner_size}, allowed: 1 or more")
        if self.markov_head not in MARKOV_HEADS:
            raise ConfigError(f"markov_head is {self.markov_head!r}, allowed: {', '.join(MARKOV_HEADS)}")
        if not 0.0 <= self.confidence_weight < float("inf"):
            raise ConfigError(f"confidence_weight is {self.confidence_weight}, allowed: 0 or more")

    def recipe(self) -> dict[str, Any]:
        """What the weights depend on besides the loop, as JSON takes it."""
        values = {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }
        return {key: value for key, value in values.items() if key not in ("loop", "evaluate_sequences")}


class DSparkTrainer:
    """A Trainer (xspec/train/loop.py). `columns` are the places of the chosen taps among the dataset's."""

    def __init__(
        self,
        model: DSparkModel,
        head: DraftHead,
        embedding: torch.Tensor,
        columns: tuple[int, ...],
        options: DSparkOptions,
    ) -> None:
        self.module, self.head, self.embedding = model, head, embedding
        self._columns, self._options = list(columns), options

    def loss(self, batch: Batch, progress: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """CE annealed into L1, plus the BCE of the confidence against the acceptance it should foretell.

        Both are means over slots weighted by exp(-k / 4) (DSpark paper, section on training).
        """
        blocks = self._blocks(batch)
        hidden = block_hidden(self.module, batch, batch.taps[:, self._columns], self.embedding, blocks)
        weights = blocks.supervised * torch.exp(-blocks.slots / SLOT_DECAY)
        weights = weights / weights.sum().clamp(min=1e-9)
        markov = self.module.markov_head
        embedded = markov.embed(blocks.previous)
        bias = (markov.state(hidden, embedded), markov.markov_w2.weight)
        hidden_of, soft = batch.hidden[blocks.rows], self._options.soft_labels
        teaching = Teaching(hidden_of, batch.log_z[blocks.rows], blocks.labels, weights, soft=soft)
        taught = teach(hidden, self.head, teaching, cross_entropy_weight(progress), bias)
        logits = self.module.confidence_head(hidden, embedded)
        accepts = taught.accept.clamp(0.0, 1.0)
        missed = F.binary_cross_entropy_with_logits(logits, accepts, reduction="none")
        loss = taught.loss + self._options.confidence_weight * (missed * weights).sum()
        with torch.no_grad():
            return loss, self._metrics(blocks, taught, (logits.sigmoid() - accepts).abs())

    def evaluate(self, reader: Reader) -> dict[str, float]:
        """Held-out figures by regime: `rollout-tau`, tokens a round commits when rounds start where the one
        before ended, and `uniform-k`, the acceptance of slot k over all anchors (dspark_eval.py)."""
        shown = reader.held_out[: self._options.evaluate_sequences]
        tallies = self.tally(reader, shown)
        return {
            name: value for regime, tally in tallies.items() for name, value in tally.figures(regime).items()
        }

    def tally(self, reader: Reader, indices: list[int]) -> dict[str, Tally]:
        """Like `evaluate` itself to be called in eval mode without gradients."""
        sequences = (self._narrow(reader.sequence(index)) for index in indices)
        return evaluate(self.module, self.head, self.embedding, sequences)

    def _narrow(self, sequence: Captured) -> Captured:
        """With the chosen taps only."""
        return Captured(
            sequence.tokens,
            sequence.hidden,
            sequence.taps[:, self._columns],
            sequence.log_z,
            sequence.prompt_len,
            sequence.held_out,
            sequence.sampled,
        )

    def _blocks(self, batch: Batch) -> Blocks:
        anchors = [
            draw_anchors(last - first, prompt_len, self._options.anchors, batch.generator)
            for (first, last), prompt_len in zip(batch.spans, batch.prompt_lens, strict=True)
        ]
        return make_blocks(batch.tokens, batch.spans, anchors, self._options.block_size)

    def _metrics(self, blocks: Blocks, taught: Taught, apart: torch.Tensor) -> dict[str, torch.Tensor]:
        supervised = blocks.supervised.float().view(-1, blocks.width)
        shares = supervised / supervised.sum(0).clamp(min=1.0)
        metrics: dict[str, torch.Tensor] = {}
        for name, values in (("accept", taught.accept), ("hit", taught.hit.float())):
            means = (values.view(-1, blocks.width) * shares).sum(0)
            metrics |= {f"{name}{slot + 1}": means[slot] for slot in range(blocks.width)}
        return {**metrics, "confidence-error": (apart.view(-1, blocks.width) * shares).sum(0).mean()}


def block_hidden(
    model: DSparkModel, batch: Batch, taps: torch.Tensor, embedding: torch.Tensor, blocks: Blocks
) -> torch.Tensor:
    """[M, H] normed output of all block rows; `taps` [N, m, H] are those the model is fed with."""
    positions = torch.cat([torch.arange(last - first) for first, last in batch.spans]).to(taps.device)
    context = model.context_keys_values(model.context(taps), positions)
    anchors = blocks.previous.view(-1, blocks.width)[:, 0]
    return model.hidden(model.block_inputs(embedding[anchors]), context, blocks)


def train_dspark(
    reader: Reader,
    weights: TargetWeights,
    options: DSparkOptions,
    output: Path,
    report: Report,
    device: torch.device | None = None,
    *,
    draft_ids: torch.Tensor | None = None,
) -> None:
    """Train, or go on training, the drafter in `output`, calibrate it and export it there when done.

    `draft_ids` [D] ascending: the draft vocabulary; None: counted over the dataset's answers.
    """
    device = device or torch.device("cpu")
    spec = reader.spec
    if tuple(weights.head.shape) != (spec.vocab_size, spec.hidden_size):
        raise ConfigError(
            f"the target's head is {list(weights.head.shape)}, "
            f"its dataset's [vocab_size, hidden_size] {[spec.vocab_size, spec.hidden_size]}"
        )
    taps = choose_taps(options, spec.taps)
    weights = weights.to(device)
    ids = draft_ids
    if ids is None:
        ids = choose_draft_vocab(count_answer_tokens(reader), options.draft_vocab_size, options.always_ids)
    sizes = model_sizes(weights.sizes, options, spec.vocab_size, len(taps))
    model = DSparkModel(sizes, generator(options.loop.seed, -1), weights.norm).to(device)
    head = draft_head(weights.head, ids.to(device))
    columns = tuple(spec.taps.index(tap) for tap in taps)
    trainer = DSparkTrainer(model, head, weights.embedding, columns, options)
    chosen = hashlib.sha256(ids.numpy().tobytes()).hexdigest()  # the ids themselves would drown a complaint
    identity = {"algorithm": "DSpark", **options.recipe(), "sizes": asdict(sizes), "draft_ids": chosen}
    tokens = train(trainer, reader, options.loop, output / CHECKPOINT, identity, device, report)
    tables, figures = calibrate_held_out(trainer, reader, options.loop, device)
    loop = {name: value for name, value in asdict(options.loop).items() if not name.endswith("_every")}
    training = {
        **loop,
        "tokens": tokens,
        "sequences": len(reader.training),
        "recipe": options.recipe(),
        "held_out": {"sequences": len(reader.held_out), **figures},
    }
    origin = Origin(spec.target, spec.target_digest, options.target_layers, weights.max_position, taps)
    export(output, model, head, origin, training, tables)


def choose_taps(options: DSparkOptions, available: tuple[int, ...]) -> tuple[int, ...]:
    """The tapped layers, ascending. The last layer is left out: exporters disagree whether it is normed."""
    taps = available if options.taps is None else options.taps
    if not taps or list(taps) != sorted(set(taps)) or not 1 <= taps[0] <= taps[-1] < options.target_layers:
        raise ConfigError(
            f"taps are {list(taps)}, allowed: ascending, from 1 to {options.target_layers - 1} "
            f"for a target of {options.target_layers} layers"
        )
    if missing := [tap for tap in taps if tap not in available]:
        raise ConfigError(f"taps {missing} are not in the dataset, which has {list(available)}")
    return tuple(taps)


def model_sizes(target: LayerSizes, options: DSparkOptions, vocab_size: int, taps: int) -> DSparkSizes:
    inner = options.inner_size or target.inner
    return DSparkSizes(
        layer=LayerSizes(**{**asdict(target), "inner": inner}),
        vocab=vocab_size,
        draft_vocab=options.draft_vocab_size,
        taps=taps,
        layers=options.layers,
        block=options.block_size,
        markov_rank=options.markov_rank,
        gated=options.markov_head == "gated",
    )


def calibrate_held_out(
    trainer: DSparkTrainer, reader: Reader, loop: LoopOptions, device: torch.device
) -> tuple[Mapping[str, Calibration], dict[str, float]]:
    """Per regime with rollouts, the table of its confidence; and the figures of all held-out sequences."""
    trainer.module.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=loop.bf16):
        tallies = trainer.tally(reader, reader.held_out)
    tables: dict[str, Calibration] = {}
    figures: dict[str, float] = {}
    for regime, tally in tallies.items():
        figures |= {name: round(value, 4) for name, value in tally.figures(regime).items()}
        if (rollouts := tally.rollouts) is not None:
            tables[regime] = calibrate(rollouts)
    return tables, figures
