"""The layout of native K/V pages as csrc/attention.h words it, and the structs of calls that read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from xspec.kernels.native import CAttend, CCache, Team, check


def interleaved(plain: torch.Tensor) -> torch.Tensor:
    """[2 * G, pages, block, D] with tokens in rows -> the same slab as the native kernels keep it."""
    planes, pages, block, dim = plain.shape
    keys, values = plain.chunk(2)
    keys = keys.reshape(planes // 2, pages, block // 16, 16, dim // 2, 2).transpose(3, 4)
    values = values.reshape(planes // 2, pages, block // 2, 2, dim).transpose(3, 4)
    return torch.cat([keys.reshape(-1), values.reshape(-1)]).view(plain.shape)


def cache_of(slab: torch.Tensor) -> CCache:
    planes, pages, block, dim = slab.shape
    return CCache(slab=slab.data_ptr(), pages=pages, block=block, kv_heads=planes // 2, dim=dim)


def bits(x: torch.Tensor) -> torch.Tensor:
    """For comparisons that tell 0 from -0 and NaN from nothing."""
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


@dataclass(frozen=True, slots=True)
class Rows:
    """N query rows over S sequences. q [N, stride >= H * D]; table [S, pages]."""

    q: torch.Tensor
    sequences: torch.Tensor
    kv_lens: torch.Tensor
    table: torch.Tensor
    heads: int

    def only(self, rows: torch.Tensor | slice) -> Rows:
        return Rows(self.q[rows], self.sequences[rows], self.kv_lens[rows], self.table, self.heads)


def attend(team: Team, rows: Rows, slab: torch.Tensor, first_key: int = 0) -> torch.Tensor:
    """[N, H * D], scores scaled by 1 / sqrt(D)."""
    dim = slab.shape[3]
    out = torch.full((len(rows.q), rows.heads * dim), 9.0, dtype=torch.bfloat16)
    sequences, kv_lens = rows.sequences.contiguous(), rows.kv_lens.contiguous()
    step = CAttend(
        q=rows.q.data_ptr(),
        q_stride=rows.q.stride(0),
        rows=len(rows.q),
        heads=rows.heads,
        sequences=sequences.data_ptr(),
        kv_lens=kv_lens.data_ptr(),
        page_table=rows.table.data_ptr(),
        table_stride=rows.table.stride(0),
        first_key=first_key,
        scale=dim**-0.5,
        out=out.data_ptr(),
        cache=cache_of(slab),
    )
    check(team.library.c.xs_attend(team.handle, step), "xs_attend")
    return out
