"""What kernels may offer for a round besides its layers: its rows as integers, and draws from logits.

All of it is optional. Where a platform offers none, the torch code of `exec` and `verify` does the same
and says what every number means; parity with it is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from xspec.nn.inputs import ForwardInputs, Segment

NO_TOKEN = -1
"""Stands where a row has no draft or no draw; equal to no token."""


@dataclass(frozen=True, slots=True)
class RowTable:
    """Persistent device rows, row 0 padding. All int64; `page_table` [rows, P], the others [rows]."""

    last_token: torch.Tensor
    length: torch.Tensor  # tokens, last_token included
    max_len: torch.Tensor
    page_table: torch.Tensor
    block_size: int
    sink_page: int


@dataclass(frozen=True, slots=True)
class FlatRows:
    """The G flat rows of a verify pass over L lanes: lane by lane without a gap, padding last."""

    row_ids: torch.Tensor  # [L] device rows, padding last
    tokens: torch.Tensor  # [G]
    lanes: torch.Tensor  # [G] lane of each flat row
    owners: torch.Tensor  # [G] its device row
    offsets: torch.Tensor  # [G] its position past the lane's last token
    first: torch.Tensor  # [L] first flat row of each lane
    counts: torch.Tensor  # [L] flat rows of each lane
    inputs: ForwardInputs


@dataclass(frozen=True, slots=True)
class Told:
    """Host memory that the tokens of a pass land in, one row per sequence."""

    tokens: torch.Tensor  # [rows, width] int64
    counts: torch.Tensor  # [rows] int64: tokens that may be believed
    bad: torch.Tensor  # [rows] bool: more were committed, but came of logits that are not finite

    def put(self, tokens: torch.Tensor, counts: torch.Tensor, bad: torch.Tensor) -> None:
        """tokens [R, W], counts [R], bad [R] of the first R rows."""
        rows, width = tokens.shape
        self.tokens[:rows, :width].copy_(tokens, non_blocking=True)
        self.counts[:rows].copy_(counts, non_blocking=True)
        self.bad[:rows].copy_(bad, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Settled:
    """What a verify pass over G flat rows committed: R live rows of L lanes, W tokens each at most."""

    tokens: torch.Tensor  # [R, W], -1 past the count
    counts: torch.Tensor  # [L], 0 of padding
    fact_slots: torch.Tensor | None = None  # [G] KV slots of flat rows that stay, the sink's of others


class DraftRows(Protocol):
    def __call__(
        self, offset: int, width: int, causal: bool, pages: int, segments: tuple[Segment, ...]
    ) -> ForwardInputs:
        """As `exec.rows.DeviceRows.decode_inputs`. The result lives until the next call like this one."""


class VerifyRows(Protocol):
    def __call__(self, uniform: bool, pages: int, segments: tuple[Segment, ...]) -> FlatRows:
        """`counts` rows of each lane; uniform: all of them. The result lives until the next call."""


class FusedRows(Protocol):
    """The bookkeeping of a round over one `RowTable`. What is bound to buffers reads them at every call."""

    def draft_rows(self, row_ids: torch.Tensor) -> DraftRows:
        """Inputs of draft passes over row_ids [L]."""

    def verify_rows(
        self, row_ids: torch.Tensor, drafts: torch.Tensor, counts: torch.Tensor, target_rows: int
    ) -> VerifyRows:
        """Inputs of verify passes over row_ids [L], drafts [L, K], counts [L] of up to K + 1 rows a lane."""

    def admit(
        self, row_ids: Sequence[int], verify: Sequence[int], signals: torch.Tensor, target_rows: int
    ) -> list[int]:
        """As `exec.budget.admit_drafts`: drafts verified of each of row_ids [L], at most verify [L] of them,
        in a pass of `target_rows` rows. signals [L or more, >= max(verify)] float32. Reads the device.
        """

    def settle(
        self,
        rows: FlatRows,
        lives: int,
        draws: torch.Tensor,
        bad: torch.Tensor,
        drafts: torch.Tensor | None,
        width: int,
        told: Told,
    ) -> Settled:
        """Accept, commit to the table and tell: draws [N], bad [N] of the first `lives` lanes' flat rows.

        drafts [lives or more, >= width]; None: there are none, and `width` is 0.
        """


@dataclass(frozen=True, slots=True)
class Chain:
    """Rows that stand on guesses, lane by lane: what each was fed, and its place in its lane.

    A row past a wrong guess is never used, so it need not be drawn. Drawing by it reads the device.
    """

    fed: torch.Tensor  # [N] int64
    offsets: torch.Tensor  # [N] int64, 0 of a lane's first row; the rows of a lane follow one another


@dataclass(frozen=True, slots=True)
class RowFilters:
    """Settings of device rows; top_k 0, top_p 1 and min_p 0 are neutral (verify.filters)."""

    top_k: torch.Tensor  # [R] int64
    top_p: torch.Tensor  # [R] float32
    min_p: torch.Tensor  # [R] float32


class FusedDraws(Protocol):
    """Tokens from logits [N, D] of one dtype. Its noise is that of verify.noise up to the last bits of its
    logarithms, and the same for a token however it is asked for."""

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(lowest column of the maximum [N], whether that is not finite [N])."""

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        keys: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor | None = None,
        filters: RowFilters | None = None,
        chain: Chain | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(column of the highest logit / temperature + noise [N], as for `argmax` [N]).

        temperatures [R] and keys [R, 2] of device rows, rows [N] among them; positions [N] of the tokens;
        ids [D] of the columns. Rows of temperature 0 take their argmax, the others what `filters` leave.
        Rows past a wrong guess of the `chain` (without `ids`) yield NO_TOKEN and are not bad.
        """

    def gumbel(
        self,
        keys: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor | None,
        columns: int,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Noise [N, M] in float32 for keys [N, 2], ids [N, M]; ids None: 0 to columns - 1."""

    def selected_probability(self, logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Softmax probability of columns [N] -> [N] float32."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A published pass over S sequences with N flat rows, for a drafter that carries states on."""

    states: torch.Tensor  # [N, hidden] of the pass
    boundary: torch.Tensor  # [device rows, hidden] of the last position published; moved on
    page_state: torch.Tensor  # [pages, hidden] of each full page's last position; moved on
    rows: torch.Tensor  # [S] device rows
    first: torch.Tensor  # [S] first flat row
    committed: torch.Tensor  # [S] flat rows that are facts
    inputs: ForwardInputs
    block_size: int
    sink_slot: int


class FusedCarry(Protocol):
    def __call__(self, carried: Carried) -> tuple[torch.Tensor, torch.Tensor]:
        """As `draft.mtp` does it in torch: moves the boundary and page states on over a published pass.

        Returns the state before each flat row [N, hidden] and the slots [N] its pair is stored at.
        """
