"""The K/V memory itself: one zeroed slab per plane, in the layout the platform's attention reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from xspec.errors import ConfigError
from xspec.kv.layout import KVLayout

if TYPE_CHECKING:
    from xspec.kernels.base import Kernels


class KVPool:
    """Allocated once, all of it touched, so that a shortage shows at start and not under load."""

    def __init__(self, layout: KVLayout, pages: int, kernels: Kernels) -> None:
        if pages < 2:
            raise ConfigError(
                f"the KV cache needs at least 2 pages (one is scratch), but only {max(0, pages)} of "
                f"{layout.page_bytes} bytes fit: raise --max_cache_size or --max_memory_utilization, "
                f"or lower --block_size ({layout.block_size})"
            )
        self.layout = layout
        self.pages = pages  # page 0, the scratch page, included
        self.slabs: tuple[torch.Tensor, ...] = tuple(
            kernels.kv_slab(pages, layout.block_size, layout.kv_heads, layout.head_dim, layout.dtype).zero_()
            for _ in range(layout.planes)
        )

    @property
    def usable_pages(self) -> int:
        return self.pages - 1

    @property
    def bytes(self) -> int:
        return self.pages * self.layout.page_bytes
