"""The kernel contract: same signatures on every platform, parity-tested against `reference.py`.

N rows, H query heads, G KV heads, D head size, P pages a table row, B block size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from xspec.nn.inputs import ForwardInputs


class PackedLinear(Protocol):
    """A weight laid out for this device. Calling it maps [N, in] to [N, out]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Kernels(Protocol):
    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Lay out weight [out, in] (and bias [out]) for repeated use; the caller drops its own copy."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last axis, accumulated in fp32 (fp64 stays fp64)."""

    def rope(self, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate halves (NeoX). q [N, H, D], k [N, G, D], cos_sin [N, 2, D] (cos and signed sin)."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate_up [N, 2 * F] -> [N, F]."""

    def kv_slab(self, pages: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """One layer's K/V storage in the layout this platform's attention reads."""

    def store_kv(self, slab: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write k, v [N, G, D] at flat slots [N]."""

    def attention(self, q: torch.Tensor, slab: torch.Tensor, inputs: ForwardInputs, scale: float) -> torch.Tensor:
        """Paged grouped-query attention: q [N, H, D] over the pages of each row's sequence -> [N, H, D].

        Row n sees the first kv_lens[n] keys of its sequence, so decode, ragged verification and
        chunked prefill are the same call.
        """
