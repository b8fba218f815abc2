"""The kernel contract: same signatures on every platform, parity-tested against `reference.py`.

N rows, H query heads, G KV heads, D head size, P pages a table row. Nothing here knows a model family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from xspec.nn.inputs import ForwardInputs


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the attention of every layer of a model has in common. `scale` multiplies q . k.

    Keys before `first_key` are never seen (MTP has no key 0), unless a row has no later one.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    first_key: int = 0


class PackedLinear(Protocol):
    """A weight laid out for this device."""

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """[N, in] -> a new [N, out]: x @ weight.T + bias, plus `add` [N, out] where given (a residual)."""


class PagedAttention(Protocol):
    """One forward pass's view of the paged cache, prepared once and used by every layer."""

    def store(self, slab: torch.Tensor, kv: torch.Tensor) -> None:
        """Write kv [N, 2 * G, D] (keys, then values) at the rows' slots.

        Of a pass with guesses, 0 for what is not finite: a wrong draft must not reach those who cannot
        even see it. A row that is right shows in its own logits that it went wrong.
        """

    def attend(self, q: torch.Tensor, slab: torch.Tensor) -> torch.Tensor:
        """Grouped-query attention: q [N, H, D] over the pages of each row's sequence -> [N, H * D].

        Row n sees the first kv_lens[n] keys of its sequence, so decode, ragged verification (see
        nn.inputs.Ragged), a block that is not causal and chunked prefill are the same call. Keys past
        kv_lens[n] weigh exactly 0, which hides any finite number; pages that hold NaN or infinity must be
        zeroed before reuse. A row with kv_lens 0 (padding) yields finite numbers that mean nothing.
        """


class Kernels(Protocol):
    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Lay out weight [out, in] (and bias [out]) for repeated use; the caller drops its own copy."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last axis; weight broadcasts against x.

        Half types are normalised in fp32, rounded, then multiplied by weight; fp64 stays fp64.
        """

    def rope_(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate halves (NeoX) in place. heads [N, *, D]; cos, sin [N, 1, D], sin's first half negated."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate_up [N, 2 * F] -> [N, F]."""

    def kv_slab(
        self, pages: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """One plane's zeroed K/V storage in the layout this platform's attention reads."""

    def store_kv(self, slab: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """Write kv [N, 2 * G, D] (keys, then values) at flat slots [N], outside of any forward pass.

        Where a slot occurs twice, either row may stay.
        """

    def zero_pages(self, slab: torch.Tensor, pages: torch.Tensor) -> None:
        """Clear whole pages (int64 ids) of one plane."""

    def paged_attention(
        self, inputs: ForwardInputs, shape: AttentionShape, slab: torch.Tensor
    ) -> PagedAttention:
        """Prepare what every layer of this forward pass shares: masks, page ids, work tiles.

        `slab` is any plane of the cache the pass runs on; only its layout matters here.
        """
