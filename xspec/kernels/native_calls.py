"""Single ops of the native library on tensors: what they need is checked here, the library trusts it.

Tensors given must stay as they are while a call runs; results are new.
"""

from __future__ import annotations

import ctypes

import torch

from xspec.kernels.native import CAttend, CCache, CLinear, Team, check

BF16 = torch.bfloat16


def linear_struct(
    kind: int,
    gated: bool,
    outs: int,
    ins: int,
    weights: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> CLinear:
    """`weights`, `scales` and `bias` packed, and alive as long as this."""
    return CLinear(
        format=kind,
        gated=gated,
        outs=outs,
        ins=ins,
        weights=weights.data_ptr(),
        scales=address(scales),
        bias=address(bias),
    )


def linear(team: Team, struct: CLinear, x: torch.Tensor, add: torch.Tensor | None) -> torch.Tensor:
    """x [N, in] bfloat16 -> [N, out] (gated: out / 2), plus `add`. ValueError for other shapes or types."""
    if x.dim() != 2 or x.shape[1] != struct.ins or x.dtype is not BF16:
        raise ValueError(f"x {list(x.shape)} {x.dtype}: this linear takes [N, {struct.ins}] bfloat16")
    columns = struct.outs // 2 if struct.gated else struct.outs
    x = _rows(x)
    y = x.new_empty(x.shape[0], columns)
    add_address, add_stride = None, 0
    if add is not None:
        if add.shape != y.shape or add.dtype is not BF16:
            raise ValueError(f"add {list(add.shape)} {add.dtype}: allowed: {list(y.shape)} bfloat16")
        add = _rows(add)
        add_address, add_stride = add.data_ptr(), add.stride(0)
    status = team.library.c.xs_linear(
        team.handle,
        ctypes.byref(struct),
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        y.data_ptr(),
        columns,
        add_address,
        add_stride,
    )
    check(status, "xs_linear")
    return y


def rms_norm(team: Team, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [.., cols] bfloat16 with weight [cols], or x [.., heads, cols] with weight [heads, cols]."""
    if weight.shape != x.shape[x.dim() - weight.dim() :] or weight.dim() not in (1, 2):
        raise ValueError(f"weight {list(weight.shape)} does not fit x {list(x.shape)}")
    if x.dtype is not BF16 or weight.dtype is not BF16:
        raise ValueError(f"x {x.dtype} and weight {weight.dtype}: allowed: bfloat16")
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    columns = weight.shape[-1]
    heads, rows = weight.numel() // columns, x.numel() // weight.numel()
    status = team.library.c.xs_rms_norm(
        team.handle, x.data_ptr(), weight.data_ptr(), eps, y.data_ptr(), rows, heads, columns
    )
    check(status, "xs_rms_norm")
    return y


def store_kv(team: Team, slab: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, *, finite: bool) -> None:
    """kv [N, 2 * G, D] to flat slots [N]; `finite`: 0 for what is not."""
    if kv.dtype is not BF16 or kv.shape[1:] != (slab.shape[0], slab.shape[3]) or len(kv) != len(slots):
        raise ValueError(
            f"kv {list(kv.shape)} {kv.dtype} does not fit {len(slots)} slots of {list(slab.shape)}"
        )
    kv, slots, cache = kv.contiguous(), slots.contiguous(), cache_of(slab)
    status = team.library.c.xs_store_kv(
        team.handle, ctypes.byref(cache), kv.data_ptr(), kv.shape[0], slots.data_ptr(), finite
    )
    check(status, "xs_store_kv")


def attend(
    team: Team,
    q: torch.Tensor,
    slab: torch.Tensor,
    sequences: torch.Tensor,
    kv_lens: torch.Tensor,
    page_table: torch.Tensor,
    first_key: int,
    scale: float,
) -> torch.Tensor:
    """q [N, H, D] -> [N, H * D]; row n sees kv_lens[n] keys of row sequences[n] of the page table."""
    rows, heads, dim = q.shape
    if q.dtype is not BF16 or dim != slab.shape[3] or not rows == len(sequences) == len(kv_lens):
        raise ValueError(f"q {list(q.shape)} {q.dtype} does not fit {list(slab.shape)}, {len(kv_lens)} rows")
    if q.stride(2) != 1 or q.stride(1) != dim:
        q = q.contiguous()
    sequences, kv_lens, page_table = sequences.contiguous(), kv_lens.contiguous(), page_table.contiguous()
    out = q.new_empty(rows, heads * dim)
    step = CAttend(
        q=q.data_ptr(),
        q_stride=q.stride(0),
        rows=rows,
        heads=heads,
        sequences=sequences.data_ptr(),
        kv_lens=kv_lens.data_ptr(),
        page_table=page_table.data_ptr(),
        table_stride=page_table.shape[1],
        first_key=first_key,
        scale=scale,
        out=out.data_ptr(),
        cache=cache_of(slab),
    )
    check(team.library.c.xs_attend(team.handle, ctypes.byref(step)), "xs_attend")
    return out


def cache_of(slab: torch.Tensor) -> CCache:
    """A slab [2 * G, pages, block, D] as the library sees it."""
    planes, pages, block, dim = slab.shape
    return CCache(slab=slab.data_ptr(), pages=pages, block=block, kv_heads=planes // 2, dim=dim)


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """With dense columns; rows may have any stride."""
    return x if x.stride(1) == 1 else x.contiguous()
