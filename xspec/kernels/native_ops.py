"""The native ops as torch operators `xspec::...`, so that torch.compile can trace what calls them.

Eager code calls the library directly: a dispatch costs as much as a small op.
"""

from __future__ import annotations

import functools

import torch

from xspec.kernels.native import NativeLibrary, Team, shared_team
from xspec.kernels.native_calls import attend, linear, linear_struct, rms_norm, store_kv


@functools.cache
def register_ops(library: NativeLibrary) -> None:
    """Define the operators, once a process. They run on the shared team of torch's thread count."""

    def team() -> Team:
        return shared_team(library, torch.get_num_threads())

    @torch.library.custom_op("xspec::linear", mutates_args=())
    def run_linear(
        x: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
        add: torch.Tensor | None,
        kind: int,
        gated: bool,
        outs: int,
    ) -> torch.Tensor:
        return linear(team(), linear_struct(kind, gated, outs, x.shape[1], weights, scales, bias), x, add)

    @run_linear.register_fake
    def _(
        x: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
        add: torch.Tensor | None,
        kind: int,
        gated: bool,
        outs: int,
    ) -> torch.Tensor:
        return x.new_empty(x.shape[0], outs // 2 if gated else outs)

    @torch.library.custom_op("xspec::rms_norm", mutates_args=())
    def run_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(team(), x, weight, eps)

    @run_rms_norm.register_fake
    def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @torch.library.custom_op("xspec::store_kv", mutates_args=("slab",))
    def run_store_kv(slab: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, finite: bool) -> None:
        store_kv(team(), slab, kv, slots, finite=finite)

    @run_store_kv.register_fake
    def _(slab: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, finite: bool) -> None:
        return None

    @torch.library.custom_op("xspec::paged_attention", mutates_args=())
    def run_attention(
        q: torch.Tensor,
        slab: torch.Tensor,
        sequences: torch.Tensor,
        kv_lens: torch.Tensor,
        page_table: torch.Tensor,
        first_key: int,
        scale: float,
    ) -> torch.Tensor:
        return attend(team(), q, slab, sequences, kv_lens, page_table, first_key, scale)

    @run_attention.register_fake
    def _(
        q: torch.Tensor,
        slab: torch.Tensor,
        sequences: torch.Tensor,
        kv_lens: torch.Tensor,
        page_table: torch.Tensor,
        first_key: int,
        scale: float,
    ) -> torch.Tensor:
        return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
