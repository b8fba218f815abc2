"""Training of an MTP drafter: one decoder layer over [embedding of a token; hidden that predicted it].

Trained on its own recursion, with exactly the keys that serving sees. Exports what serving loads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from xspec.errors import ConfigError
from xspec.train.dataset import Batch, DatasetSpec, Reader, choose_draft_vocab, count_answer_tokens, pack
from xspec.train.layers import DecoderLayer, LayerSizes, RMSNorm, TargetWeights, initialise
from xspec.train.loop import LoopOptions, Report, generator, train
from xspec.train.loss import DraftHead, Taught, Teaching, cross_entropy_weight, draft_head, teach

RESIDUAL, NORMED = "residual", "normed"
CHECKPOINT = "training.pt"


@dataclass(frozen=True, slots=True)
class MtpOptions:
    loop: LoopOptions
    draft_vocab_size: int = 16384
    always_ids: tuple[int, ...] = ()  # in the draft vocabulary whatever their count: end and special tokens
    inner_size: int | None = None  # of the layer's MLP; None: 4 x hidden
    unroll: int = 3
    step_decay: float = 0.7  # weight of step j: step_decay ** (j - 1)
    supervise: float = 0.5  # random share of the answer's positions a training step starts chains at
    step_hidden: str = RESIDUAL  # what a step hands to the next: the layer's output before or after the norm
    soft_labels: bool = True  # cross entropy with the target's distribution; else with the answer's token
    evaluate_sequences: int = 64

    def __post_init__(self) -> None:
        if self.step_hidden not in (RESIDUAL, NORMED):
            raise ConfigError(f"step_hidden is {self.step_hidden!r}, allowed: {RESIDUAL}, {NORMED}")
        if self.unroll < 1:
            raise ConfigError(f"unroll is {self.unroll}, allowed: 1 or more")
        if not 0.0 < self.supervise <= 1.0:
            raise ConfigError(f"supervise is {self.supervise}, allowed: above 0, up to 1")


class SharedHead(nn.Module):
    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.norm = RMSNorm(sizes.hidden, sizes.norm_eps)


class MtpModel(nn.Module):
    """The weights, under the names of the exported checkpoint (less its prefix `model.`)."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.enorm = RMSNorm(sizes.hidden, sizes.norm_eps)
        self.hnorm = RMSNorm(sizes.hidden, sizes.norm_eps)
        self.eh_proj = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(sizes)])
        self.shared_head = SharedHead(sizes)

    def pair(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """DeepSeek-V3 (arXiv 2412.19437) equation 21: [n, H] of a token and the hidden before it."""
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))


@dataclass(frozen=True, slots=True)
class Chains:
    """C chains of drafts: where in a packed batch each starts, and up to which row its sequence goes."""

    anchors: torch.Tensor  # [C] flat row of the chain's last known token
    ends: torch.Tensor  # [C] last flat row of its sequence
    positions: torch.Tensor  # [C] the anchor's position in its sequence
    counts: tuple[int, ...]  # chains of each sequence, which are consecutive


def choose_chains(batch: Batch, share: float) -> Chains:
    """A random share of the answer tokens that have a next one. The first token has no hidden before it."""
    anchors, ends, positions, counts = [], [], [], []
    for (start, stop), prompt_len in zip(batch.spans, batch.prompt_lens, strict=True):
        first = max(1, prompt_len)
        own = torch.arange(first, max(first, stop - start - 1))
        if share < 1.0:
            own = own[torch.rand(len(own), generator=batch.generator) < share]
        anchors.append(own + start)
        positions.append(own)
        ends.append(torch.full_like(own, stop - 1))
        counts.append(len(own))
    device = batch.tokens.device
    rows, last, own = (torch.cat(parts).to(device) for parts in (anchors, ends, positions))
    return Chains(rows, last, own, tuple(counts))


def unroll(
    model: MtpModel, embedding: torch.Tensor, batch: Batch, chains: Chains, steps: int, step_hidden: str
) -> torch.Tensor:
    """[C, steps, H]: normed output of each step of each chain, drafted tokens being the sequence's own.

    Step j of a chain anchored at position p runs at p + j - 1. It sees what serving's cache then holds: keys
    made of target hiddens at 1..p (step 1's), and the chain's own of steps 2..j behind them.
    """
    layer = model.layers[0]
    assert isinstance(layer, DecoderLayer)
    attention = layer.self_attn
    rows, row_positions, row_spans = _paired_rows(batch)
    paired = model.pair(embedding[batch.tokens[rows]], batch.hidden[rows - 1])
    keys, values = attention.keys_values(layer.input_layernorm(paired), row_positions)
    stream = paired[torch.searchsorted(rows, chains.anchors)]
    own_keys: list[torch.Tensor] = []
    own_values: list[torch.Tensor] = []
    outputs = []
    for ahead in range(steps):
        positions = chains.positions + ahead
        normed = layer.input_layernorm(stream)
        if ahead:
            key, value = attention.keys_values(normed, positions)
            own_keys.append(key)
            own_values.append(value)
        queries = attention.queries(normed, positions)
        mixed = []
        first = 0
        for (start, stop), count in zip(row_spans, chains.counts, strict=True):
            part = slice(first, first + count)
            first += count
            mask = row_positions[start:stop] <= chains.positions[part, None]
            own = None
            if ahead:
                own = (
                    torch.stack([key[part] for key in own_keys], 1),
                    torch.stack([value[part] for value in own_values], 1),
                )
            mixed.append(attention.mix(queries[part], keys[start:stop], values[start:stop], mask, own))
        stream = layer.finish(stream, torch.cat(mixed))
        outputs.append(model.shared_head.norm(stream))
        if ahead + 1 < steps:
            tokens = batch.tokens[torch.minimum(chains.anchors + ahead + 1, chains.ends)]
            stream = model.pair(embedding[tokens], stream if step_hidden == RESIDUAL else outputs[-1])
    return torch.stack(outputs, dim=1)


def _paired_rows(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """Flat rows that have a row before them in their sequence, their positions, and each sequence's span."""
    spans, first = [], 0
    for start, stop in batch.spans:
        spans.append((first, first + stop - start - 1))
        first = spans[-1][1]
    device = batch.tokens.device
    positions = torch.cat([torch.arange(1, stop - start) for start, stop in batch.spans]).to(device)
    rows = torch.cat([torch.arange(start + 1, stop) for start, stop in batch.spans]).to(device)
    return rows, positions, spans


class MtpTrainer:
    """A Trainer (xspec/train/loop.py)."""

    def __init__(self, model: MtpModel, weights: TargetWeights, head: DraftHead, options: MtpOptions) -> None:
        self.module, self.head = model, head
        self._embedding, self._options = weights.embedding, options

    def loss(self, batch: Batch, progress: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        steps = self._options.unroll
        chains = choose_chains(batch, self._options.supervise)
        taught, valid = self._teach(batch, chains, cross_entropy_weight(progress))
        shares = valid / valid.sum(0).clamp(min=1)
        accept, hit = ((part * shares).sum(0) for part in (taught.accept, taught.hit))
        metrics = {f"accept{step + 1}": accept[step] for step in range(steps)}
        metrics |= {f"hit{step + 1}": hit[step] for step in range(steps)}
        return taught.loss, metrics

    def evaluate(self, reader: Reader) -> dict[str, float]:
        """Of held-out sequences, by kind of answer (greedy, sampled).

        `K-hit` and `K-accept`: uniform over positions, earlier drafts taken as right: how often draft K is
        the answer's token, and the mean of sum min(q, p). `tau`: tokens a round commits when rounds start
        where the one before ended, greedy drafts against the answer's tokens, the target's own included.
        """
        steps = self._options.unroll
        totals: dict[str, torch.Tensor] = {}
        for index in reader.held_out[: self._options.evaluate_sequences]:
            sequence = reader.sequence(index)
            batch = pack([sequence], generator(0, 0), self._embedding.device)
            chains = choose_chains(batch, 1.0)
            if not len(chains.anchors):
                continue
            taught, valid = self._teach(batch, chains, 1.0)
            hits = (taught.hit & valid).cpu()
            sums = torch.stack((valid.sum(0), hits.sum(0), (taught.accept * valid).sum(0))).double().cpu()
            rounds = torch.tensor(jump(hits.long().cumprod(1).sum(1).tolist()), dtype=torch.float64)
            kind = "sampled" if sequence.sampled else "greedy"
            totals[kind] = totals.get(kind, 0) + torch.cat((sums.flatten(), rounds))
        figures = {}
        for kind, total in sorted(totals.items()):
            valid_sum, hit_sum, accept_sum = total[: 3 * steps].view(3, steps)
            committed, rounds_run = total[3 * steps :].tolist()
            figures[f"{kind} tau"] = committed / rounds_run
            for step in range(steps):
                count = max(1.0, float(valid_sum[step]))
                figures[f"{kind} {step + 1}-hit"] = float(hit_sum[step]) / count
                figures[f"{kind} {step + 1}-accept"] = float(accept_sum[step]) / count
        return figures

    def _teach(self, batch: Batch, chains: Chains, ce_weight: float) -> tuple[Taught, torch.Tensor]:
        """Row results as [C, steps], and which of them have a token to be compared with."""
        options, steps = self._options, self._options.unroll
        outputs = unroll(self.module, self._embedding, batch, chains, steps, options.step_hidden)
        ahead = torch.arange(steps, device=outputs.device)
        rows = chains.anchors[:, None] + ahead  # of the target: where it chose the token drafted
        valid = rows < chains.ends[:, None]
        rows = torch.minimum(rows, chains.ends[:, None] - 1)
        weights = valid * options.step_decay ** ahead.float()
        weights = weights / weights.sum().clamp(min=1e-9)
        flat = rows.flatten()
        labels, soft = batch.tokens[flat + 1], options.soft_labels
        teaching = Teaching(batch.hidden, batch.log_z, labels, weights.flatten(), flat, soft)
        taught = teach(outputs.flatten(0, 1), self.head, teaching, ce_weight)
        shape = (len(chains.anchors), steps)
        parts = (taught.accept, taught.hit, taught.agree, taught.cross_entropy, taught.distance)
        return Taught(taught.loss, *(part.view(shape) for part in parts)), valid


def digest(ids: torch.Tensor) -> str:
    return hashlib.sha256(json.dumps(ids.tolist()).encode()).hexdigest()[:16]


def jump(accepted: list[int]) -> tuple[int, int]:
    """Tokens committed and rounds run over an answer, of which `accepted[i]` drafts at token i are right."""
    place = rounds = 0
    while place < len(accepted):
        place += accepted[place] + 1
        rounds += 1
    return place, rounds


def train_mtp(
    reader: Reader,
    weights: TargetWeights,
    options: MtpOptions,
    output: Path,
    report: Report,
    device: torch.device,
    draft_ids: torch.Tensor | None = None,
) -> None:
    """Train, or go on training, the drafter in `output`, and export it there when done.

    `draft_ids` [D] ascending is its vocabulary; by default counted over the answers of `reader`, which makes
    a run that is resumed with a grown dataset another run.
    """
    spec = reader.spec
    if tuple(weights.head.shape) != (spec.vocab_size, spec.hidden_size):
        raise ConfigError(
            f"the target's head is {list(weights.head.shape)}, "
            f"its dataset's [vocab_size, hidden_size] {[spec.vocab_size, spec.hidden_size]}"
        )
    weights = weights.to(device)
    sizes = LayerSizes(**{**asdict(weights.sizes), "inner": options.inner_size or 4 * spec.hidden_size})
    ids = draft_ids
    if ids is None:
        ids = choose_draft_vocab(count_answer_tokens(reader), options.draft_vocab_size, options.always_ids)
    model = MtpModel(sizes)
    initialise(model, generator(options.loop.seed, -1))
    model.to(device)
    trainer = MtpTrainer(model, weights, draft_head(weights.head, ids.to(device)), options)
    recipe = {
        name: value for name, value in asdict(options).items() if name not in ("loop", "evaluate_sequences")
    }
    identity = {"algorithm": "MTP", **recipe, "sizes": asdict(sizes), "draft_vocabulary": digest(ids)}
    tokens = train(trainer, reader, options.loop, output / CHECKPOINT, identity, device, report)
    recipe["always_ids"] = list(options.always_ids)
    loop = {name: value for name, value in asdict(options.loop).items() if not name.endswith("_every")}
    training = {**loop, "tokens": tokens, "sequences": len(reader.training), "recipe": recipe}
    export(output, model, trainer.head, weights, options, spec, training)


def export(
    output: Path,
    model: MtpModel,
    head: DraftHead,
    weights: TargetWeights,
    options: MtpOptions,
    spec: DatasetSpec,
    training: dict[str, Any],
) -> None:
    """Write `config.json` and `model.safetensors` (fp16), which the MTP drafter loads."""
    sizes = model.sizes
    config = {
        "architectures": ["LlamaMtpForCausalLM"],
        "model_type": "llama_mtp",
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.inner,
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": sizes.rope_theta,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": len(head.ids),
        "num_hidden_layers": 1,
        "max_position_embeddings": weights.max_position,
        "torch_dtype": "float16",
        "target_hidden": NORMED,
        "step_hidden": options.step_hidden,
        "target": {"name": spec.target, "digest": spec.target_digest},
        "training": training,
    }
    tensors = {f"model.{name}": tensor.detach().half().cpu() for name, tensor in model.state_dict().items()}
    tensors["d2t"] = head.offsets.cpu()
    output.mkdir(parents=True, exist_ok=True)
    write_model(output, config, tensors)


def write_model(output: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """The config comes last: a directory with one has its weights."""

    def replace(name: str, write: Callable[[Path], object]) -> None:
        partial = output / f"{name}.partial"
        write(partial)
        partial.replace(output / name)

    # Not save_file, which makes the file its owner's alone whatever the umask says.
    replace("model.safetensors", lambda path: path.write_bytes(save(tensors, {"format": "pt"})))
    text = json.dumps(config, indent=2) + "\n"
    replace("config.json", lambda path: path.write_text(text, encoding="utf-8"))
