"""Looped transformers: layers that run several times over, each time with K/V planes of their own.

Another looped family needs one file, which says its config keys, its tensors and how its LoopedParts are
built (FAMILY, a LoopedFamily), and one line in models/registry.py.
KV planes: loop t, layer l is plane t * num_layers + l; then the prelude's layers, then the coda's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xspec.errors import CheckpointError, ConfigError, UnsupportedError
from xspec.kernels.base import LoopParts, PackedLinear
from xspec.models.base import Hidden, TargetSpec
from xspec.models.blocks import LayerBuilder, rows_of_head
from xspec.models.checkpoint import Shapes
from xspec.models.config import ConfigReader, DecoderConfig
from xspec.nn.embed import Embedding
from xspec.nn.inputs import ForwardInputs
from xspec.nn.norm import RMSNorm
from xspec.nn.stack import LayerStack

EXIT_FLAG = "early_exit_threshold"

# Keys that say nothing about what a forward pass computes, in any family.
_INERT = frozenset(
    ("architectures", "attention_dropout", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id")
    + ("dtype", "torch_dtype", "id2label", "label2id", "initializer_range", "model_type", "use_cache")
    + ("output_attentions", "output_hidden_states", "problem_type", "return_dict", "transformers_version")
    + ("keys_to_ignore_at_inference", "chunk_size_feed_forward", "is_encoder_decoder", "pretraining_tp")
)
# Keys that read_decoder reads or refuses on its own.
DECODER_KEYS = frozenset(
    ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    + ("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps")
    + ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "tie_word_embeddings")
    + ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
    + ("quantization_config", "compression_config")
)


_OFF: tuple[object, ...] = (None, False, 0, "", [], {})


@dataclass(frozen=True, slots=True)
class LoopedConfig(DecoderConfig):
    """`num_layers` are those of one loop."""

    loops: int = 1  # D
    prelude_layers: int = 0  # before the loops
    coda_layers: int = 0  # after them
    embed_scale: float = 1.0
    exit_threshold: float | None = None  # None: the family has no exit gate


@dataclass(frozen=True, slots=True)
class LoopedFamily:
    """What a family's file exports."""

    read_config: Callable[[Mapping[str, Any]], LoopedConfig]
    tensor_shapes: Callable[[LoopedConfig], dict[str, tuple[int, ...]]]
    """Every tensor of the checkpoint, and no other."""
    tied_head: str
    """A tensor that may lie in the checkpoint all the same where the head is the embedding."""
    build: Callable[[LoopedConfig, LayerBuilder], LoopedParts]

    def optional_tensors(self, config: LoopedConfig) -> frozenset[str]:
        return frozenset({self.tied_head}) if config.tied_head else frozenset()


@dataclass(frozen=True, slots=True)
class LoopedParts:
    """What a looped target is made of; a part that a family does not have is None."""

    embedding: Embedding
    core: LayerStack  # one loop, its norm included where the family norms every loop
    head: PackedLinear
    prelude: LayerStack | None = None  # turns the embedding e into what every loop gets to see again
    inject: PackedLinear | None = None  # [s, e] -> s, before every loop; None: the loops see e only once
    exit_norm: RMSNorm | None = None  # between the loops and the coda
    coda: LayerStack | None = None
    gate: ExitGate | None = None


class LoopedDecoder:
    """A LoopedTarget (models/base.py). The state is s, or [s, e] where every loop gets e injected."""

    def __init__(self, config: LoopedConfig, parts: LoopedParts, dtype: torch.dtype) -> None:
        self.config, self._parts, self._dtype = config, parts, dtype
        self.spec = TargetSpec(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position=config.max_position,
            loops=config.loops,
            exit_threshold=1.0 if config.exit_threshold is None else config.exit_threshold,
            outer_layers=config.prelude_layers + config.coda_layers,
            state_size=config.hidden_size * (1 if parts.inject is None else 2),
        )
        looped = config.num_layers * config.loops
        self._prelude_planes = slice(looped, looped + config.prelude_layers)
        self._coda_planes = slice(looped + config.prelude_layers, looped + self.spec.outer_layers)

    def forward(
        self,
        tokens: torch.Tensor,
        inputs: ForwardInputs,
        kv: tuple[torch.Tensor, ...],
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        """All loops, whatever the exit: later tokens read what every loop wrote.

        With an exit threshold below 1, `last` is each row's state after the loop it exits. Taps are refused.
        """
        if taps:
            raise UnsupportedError(
                f"a drafter cannot tap a looped target ({self.spec.model_type})",
                [f"taps={taps}: a layer of {self.spec.loops} loops has no one residual stream; allowed: ()"],
            )
        state = self.begin(tokens, inputs, kv)
        gate = self._parts.gate
        if gate is None or self.spec.exit_threshold >= 1.0:
            return self.finish(self.run_loops(state, inputs, kv, 0, self.spec.loops), inputs, kv)
        states = tuple(self._loops(state, inputs, kv, 0, self.spec.loops))
        return self.finish(gate.choose(states, self.spec.exit_threshold), inputs, kv)

    def begin(
        self, tokens: torch.Tensor, inputs: ForwardInputs, kv: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        parts = self._parts
        entry = parts.embedding(tokens)
        if parts.prelude is not None:
            entry = parts.prelude(entry, inputs, kv[self._prelude_planes]).last
        # A random initial state is what training has; 0 is its mean and draws nothing (arXiv 2502.05171, 3).
        return entry if parts.inject is None else torch.cat((torch.zeros_like(entry), entry), dim=-1)

    def run_loops(
        self,
        state: torch.Tensor,
        inputs: ForwardInputs,
        kv: tuple[torch.Tensor, ...],
        first: int,
        last: int,
    ) -> torch.Tensor:
        if not 0 <= first <= last <= self.spec.loops:
            raise ValueError(f"loops {first} to {last} of a target with {self.spec.loops}")
        for after in self._loops(state, inputs, kv, first, last):
            state = after
        return state

    def finish(self, state: torch.Tensor, inputs: ForwardInputs, kv: tuple[torch.Tensor, ...]) -> Hidden:
        """`residual` is the stream before the coda's final norm; without a coda the state itself."""
        parts = self._parts
        if parts.coda is None or parts.exit_norm is None:
            return Hidden(state, state)
        inner = parts.exit_norm(state[:, : self.spec.hidden_size].contiguous())
        streams = parts.coda(inner, inputs, kv[self._coda_planes])
        return Hidden(streams.last, streams.residual)

    def loop_parts(self) -> LoopParts | None:
        parts = self._parts
        table, layers = parts.embedding.table, parts.core.fused
        more = (parts.prelude, parts.inject, parts.coda, parts.exit_norm)
        if table is None or layers is None or not parts.core.normed or any(part is not None for part in more):
            return None
        return LoopParts(table, layers, parts.head)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._parts.head(hidden)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._parts.embedding(tokens)

    def embedding(self) -> torch.Tensor | None:
        return self._parts.embedding.table

    def head(self) -> PackedLinear | None:
        return self._parts.head

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return rows_of_head(self._parts.head, ids, self.spec.hidden_size, self._dtype)

    def gates(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The states after every loop, [N, hidden] each -> [N, D], ExitGate.probabilities of them."""
        if self._parts.gate is None:
            raise UnsupportedError("no exit probabilities", [f"{self.spec.model_type} has no exit gate"])
        return self._parts.gate.probabilities(states)

    def _loops(
        self,
        state: torch.Tensor,
        inputs: ForwardInputs,
        kv: tuple[torch.Tensor, ...],
        first: int,
        last: int,
    ) -> Iterator[torch.Tensor]:
        """The state after each of the loops."""
        core, inject, layers = self._parts.core, self._parts.inject, self.spec.num_layers
        prepared = core.prepare(inputs, kv[0])
        if inject is None:
            yield from core.loop(state, inputs, kv[first * layers : last * layers], prepared)
            return
        entry = state[:, self.spec.hidden_size :]
        for loop in range(first, last):
            planes = kv[loop * layers : (loop + 1) * layers]
            inner = core.run(inject(state), inputs, planes, prepared).last
            state = torch.cat((inner, entry), dim=-1)
            yield state


class ExitGate:
    """Where a row may stop (Ouro, arXiv 2510.25741, section 3): lambda_t = sigmoid(w . x_t + b)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self._weight, self._bias = weight.flatten().to(exact), bias.to(exact)

    def stops(self, state: torch.Tensor) -> torch.Tensor:
        """[N, hidden] after a loop -> lambda [N], fp32 or wider."""
        # Row by row, so that it does not depend on the rows beside it.
        return torch.sigmoid((state.to(self._weight.dtype) * self._weight).sum(-1) + self._bias)

    def probabilities(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """[N, D]: p_t = lambda_t * prod over j < t of (1 - lambda_j); the last loop takes what is left."""
        left = torch.ones_like(self.stops(states[0]))
        each = []
        for state in states[:-1]:
            stop = self.stops(state)
            each.append(stop * left)
            left = left * (1.0 - stop)
        return torch.stack([*each, left], dim=-1)

    def choose(self, states: Sequence[torch.Tensor], threshold: float) -> torch.Tensor:
        """[N, hidden]: each row's first state with a cumulative probability of `threshold` (Q-exit)."""
        reached = self.probabilities(states).cumsum(-1) >= threshold
        reached[:, -1] = True
        first = reached.to(torch.uint8).argmax(-1)
        return torch.stack(tuple(states), dim=1)[torch.arange(len(first), device=first.device), first]


def refuse_unknown(config: ConfigReader, known: Iterable[str], switches: Mapping[str, object]) -> None:
    """Refuse by name every switch that is not off, and every key set that is none of the known.

    `switches` hold the one value that is implemented; null and absence always mean it.
    """
    for key, off in switches.items():
        value = config.raw.get(key)
        same = value is None or value == off or (off is not None and not off and value in _OFF)
        if not same:
            config.refuse(f"{key}={value!r} (only {off!r})")
    passed = _INERT.union(known, switches)
    for key, value in config.raw.items():
        if key not in passed and not key.startswith("_") and value not in _OFF:
            config.refuse(f"{key}={value!r}: a key that is not known here")


def read_threshold(config: ConfigReader) -> float:
    """early_exit_threshold of config.json; null: 1, as the published code reads it."""
    value = config.number(config.raw, EXIT_FLAG, 1.0)
    if value > 1.0:
        config.wrong(f"{EXIT_FLAG} must be above 0 and at most 1, found {value}")
    return value


def with_exit_threshold(config: DecoderConfig, asked: float | None, where: str) -> DecoderConfig:
    """The config under --early_exit_threshold; UnsupportedError where there is no gate to read."""
    if asked is None:
        return config
    if not isinstance(config, LoopedConfig) or config.exit_threshold is None:
        raise UnsupportedError(
            f"--{EXIT_FLAG}={asked} cannot be had for {where}",
            [f"model_type {config.model_type} has no exit gate; allowed: to leave the flag out"],
        )
    if not 0.0 < asked <= 1.0:
        raise ConfigError(f"--{EXIT_FLAG}={asked} must be above 0 and at most 1")
    return dataclasses.replace(config, exit_threshold=asked)


def check_planes(config: LoopedConfig, shapes: Shapes, where: str) -> None:
    """A sane number of loops and layers, before anything that large is listed or allocated."""
    planes = config.num_layers * config.loops + config.prelude_layers + config.coda_layers
    if planes > 1 << 16 or config.prelude_layers + config.coda_layers > len(shapes):
        raise CheckpointError(
            f"{where}: its config says {config.num_layers} layers in {config.loops} loops, "
            f"{config.prelude_layers} before and {config.coda_layers} after them"
        )
