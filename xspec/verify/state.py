"""Sampling state of the device rows: settings, noise keys, penalty counts, held-back stop ids, bias.

Everything a row's next token depends on besides its logits lives here and is advanced on the device
at accept, so overlapped rounds need no host copy. Row 0 is padding and stays neutral (greedy).
Knows nothing about filters, drafts or how rows are scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xspec.core.request import SamplingParams
from xspec.core.round import PADDING_ROW, RowBind
from xspec.errors import RequestError
from xspec.kernels.rounds import Chain, FusedDraws, RowFilters
from xspec.verify.filters import WINDOWS, FilterRules
from xspec.verify.noise import GumbelNoise, Scratch, row_keys

_TEMPERATURE, _TOP_P, _MIN_P, _PRESENCE, _FREQUENCY, _REPETITION = range(6)
_NEUTRAL = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
_TOP_K, _PROMPT_LEN, _MIN_TOKENS = range(3)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What pays on a device, never what is drawn. Windows cost host reads: accelerators pass ()."""

    windows: tuple[int, ...] = WINDOWS
    chunk_elements: int = 1 << 19  # logits worked on at a time: buffers that stay in a core's cache


class SamplingState:
    """Tensors [rows, ...] on one device; `dtype` is that of the settings (float64 for exact tests).

    `fused`: draws in fewer calls from bfloat16 logits, where the platform's kernels have them. The noise of
    all float32 draws is theirs then, so that a token's never depends on the way it is drawn.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        tuning: Tuning | None = None,
        fused: FusedDraws | None = None,
    ) -> None:
        self.rows = rows
        self.vocab_size = vocab_size
        self.device = device
        self.tuning = tuning or Tuning()
        self.noise = GumbelNoise(vocab_size, device)
        self.scratch = Scratch(vocab_size, device)
        self._fused = fused
        self._reals = torch.tensor(_NEUTRAL, dtype=dtype, device=device).repeat(rows, 1)
        self._temperatures = self._reals[:, _TEMPERATURE]
        self._ints = torch.zeros(rows, 3, dtype=torch.int64, device=device)
        self._filters = RowFilters(self._ints[:, _TOP_K], self._reals[:, _TOP_P], self._reals[:, _MIN_P])
        self._keys = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self._bias = _SparseRows(rows, dtype, device)
        self._stops = _SparseRows(rows, dtype, device)
        self._counts: torch.Tensor | None = None  # [rows, vocab] int32: answer tokens so far
        self._prompt_seen: torch.Tensor | None = None  # [rows, vocab] bool

    def bind(self, row: int, bind: RowBind) -> None:
        """Give `row` to a sequence. Rebinding after a preemption restores what advance() had built."""
        if not PADDING_ROW < row < self.rows:
            raise ValueError(f"row {row} is not a sampling row (1 to {self.rows - 1})")
        params = bind.params
        check_ids(params, self.vocab_size)
        self._reals[row] = self._reals.new_tensor(
            (
                0.0 if params.greedy else params.temperature,  # draws of mixed rows know them by it
                params.top_p,
                params.min_p,
                params.presence_penalty,
                params.frequency_penalty,
                params.repetition_penalty,
            )
        )
        self._ints[row] = self._ints.new_tensor((params.top_k, bind.prompt_len, params.min_tokens))
        self._keys[row] = self._keys.new_tensor(row_keys(bind.seed, bind.choice))
        self._bias.put(row, tuple(params.logit_bias), tuple(params.logit_bias.values()))
        stops = tuple(sorted({i for i in bind.stop_ids if 0 <= i < self.vocab_size}))
        held = stops if params.min_tokens > 0 else ()  # ids past the vocabulary are never drawn anyway
        self._stops.put(row, held, (float("-inf"),) * len(held))
        if params.penalised:
            self._seed_counts(row, bind)

    def advance(self, rows: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Count the committed tokens: rows [R], tokens [R, W], of which the first counts [R] are meant.

        Padding lanes carry count 0. Rows that are not penalised are counted too; nothing reads them.
        """
        if self._counts is None:
            return
        lane = torch.arange(tokens.shape[1], device=tokens.device)
        meant = lane < counts.unsqueeze(1)
        where = rows.unsqueeze(1) * self.vocab_size + tokens.masked_fill(~meant, 0)
        self._counts.view(-1).scatter_add_(0, where.flatten(), meant.flatten().to(torch.int32))

    def temperature(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[N, 1]; meaningful for rows that are not greedy."""
        return self._reals.index_select(0, rows)[:, _TEMPERATURE, None].to(dtype)

    def sampled(self, rows: torch.Tensor) -> torch.Tensor:
        """[N] bool: which rows draw with a temperature."""
        return self._temperatures[rows] > 0.0

    def rules(self, rows: torch.Tensor, dtype: torch.dtype) -> FilterRules:
        reals = self._reals.index_select(0, rows).to(dtype)
        return FilterRules(self._ints.index_select(0, rows)[:, _TOP_K], reals[:, _TOP_P], reals[:, _MIN_P])

    def gumbel(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The noise that decides the tokens at `positions` of device rows `rows`; drafters may share it."""
        keys = self._keys.index_select(0, rows)
        if self._fused is not None and dtype == torch.float32:
            return self._fused.gumbel(keys, positions, ids, self.vocab_size, out)
        return self.noise.gumbel(keys, positions, ids, dtype=dtype, out=out)

    def fused_for(self, logits: torch.Tensor) -> FusedDraws | None:
        """What draws from such logits in one call; None: the torch code does."""
        return self._fused if logits.dtype == torch.bfloat16 else None

    def draw(
        self,
        fused: FusedDraws,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor | None = None,
        *,
        filtered: bool = False,
        chain: Chain | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(columns, bad) [N] of device rows [N]: with their temperature and noise, or greedily without.

        Their top-k, top-p and min-p count only if `filtered`.
        """
        filters = self._filters if filtered else None
        return fused.draw(logits, self._temperatures, self._keys, rows, positions, ids, filters, chain)

    def add_bias(self, logits: torch.Tensor, rows: torch.Tensor) -> None:
        ids, values = self._bias.get(rows)
        logits.scatter_add_(1, ids, values.to(logits.dtype))

    def hold_stops(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Mask stop ids while the answer is shorter than min_tokens."""
        ints = self._ints.index_select(0, rows)
        early = positions - ints[:, _PROMPT_LEN] < ints[:, _MIN_TOKENS]
        ids, values = self._stops.get(rows)
        logits.scatter_add_(1, ids, values.to(logits.dtype).masked_fill(~early.unsqueeze(1), 0.0))

    def penalise(self, logits: torch.Tensor, rows: torch.Tensor, prefix: torch.Tensor | None) -> None:
        """Repetition over prompt and answer, then frequency and presence over the answer.

        `prefix` [N, W] (-1 padded): drafted ids that stand between the committed answer and the draw.
        """
        if self._counts is None or self._prompt_seen is None:
            raise ValueError("penalised rows are drawn before any was bound")
        counts = self._counts.index_select(0, rows)
        if prefix is not None:
            counts.scatter_add_(1, prefix.clamp(min=0), (prefix >= 0).to(torch.int32))
        reals = self._reals.index_select(0, rows).to(logits.dtype)
        repetition = reals[:, _REPETITION, None]
        answered = counts > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        torch.where(answered | self._prompt_seen.index_select(0, rows), repeated, logits, out=logits)
        logits.sub_(counts.to(logits.dtype).mul_(reals[:, _FREQUENCY, None]))
        logits.sub_(answered.to(logits.dtype).mul_(reals[:, _PRESENCE, None]))

    def _seed_counts(self, row: int, bind: RowBind) -> None:
        if self._counts is None or self._prompt_seen is None:
            shape = (self.rows, self.vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._prompt_seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        ids = torch.tensor(bind.token_ids, dtype=torch.int64, device=self.device)
        self._prompt_seen[row] = False
        self._prompt_seen[row, ids[: bind.prompt_len]] = True
        self._counts[row] = 0
        answer = ids[bind.prompt_len :]
        self._counts[row].scatter_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse biased ids outside the vocabulary; admission calls this before a row is ever bound."""
    for token in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias names token {token}; the vocabulary has ids 0 to {vocab_size - 1}",
                param="logit_bias",
            )


class _SparseRows:
    """A few (id, value) pairs per row, zero-padded to a common width that grows with the longest."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._ids = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        self._values = torch.zeros(rows, 0, dtype=dtype, device=device)
        self._used = [0] * rows  # pairs per row, so that empty rows cost nothing to rebind

    def put(self, row: int, ids: Sequence[int], values: Sequence[float]) -> None:
        count = len(ids)
        if count > self._ids.shape[1]:
            width = 1 << (count - 1).bit_length()
            grow = (0, width - self._ids.shape[1])
            self._ids = torch.nn.functional.pad(self._ids, grow)
            self._values = torch.nn.functional.pad(self._values, grow)
        if self._used[row]:
            self._ids[row] = 0
            self._values[row] = 0.0
        if count:
            self._ids[row, :count] = self._ids.new_tensor(ids)
            self._values[row, :count] = self._values.new_tensor(values)
        self._used[row] = count

    def get(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and values [N, width]; pads add 0 to id 0."""
        return self._ids.index_select(0, rows), self._values.index_select(0, rows)
