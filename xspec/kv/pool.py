"""The K/V memory itself: one zeroed slab per plane, in the layout the platform's attention reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from xspec.errors import ConfigError
from xspec.kv.layout import KVLayout, Planes

if TYPE_CHECKING:
    from xspec.kernels.base import Kernels

RESERVED_PAGES = 2
"""The scratch page (first) and the sink page (last)."""


class KVPool:
    """Allocated once, all of it touched, so that a shortage shows at start and not under load."""

    def __init__(self, layout: KVLayout, pages: int, kernels: Kernels, device: torch.device) -> None:
        if pages < RESERVED_PAGES + 1:
            raise ConfigError(
                f"the KV cache needs at least {RESERVED_PAGES + 1} pages ({RESERVED_PAGES} are reserved), "
                f"but only {max(0, pages)} of {layout.page_bytes} bytes fit: raise --max_cache_size or "
                f"--max_memory_utilization, or lower --block_size ({layout.block_size})"
            )
        self.layout = layout
        self.pages = pages  # reserved ones included
        self.target = self._slabs(layout.target, kernels)
        self.draft: tuple[torch.Tensor, ...] = ()
        self.page_state = torch.zeros(0, 0, dtype=layout.dtype, device=device)  # [pages, page_state]
        if layout.draft is not None:
            self.draft = self._slabs(layout.draft, kernels)
            self.page_state = torch.zeros(pages, layout.draft.page_state, dtype=layout.dtype, device=device)

    def _slabs(self, planes: Planes, kernels: Kernels) -> tuple[torch.Tensor, ...]:
        layout = self.layout
        return tuple(
            kernels.kv_slab(
                self.pages, layout.block_size, planes.kv_heads, planes.head_dim, layout.dtype
            ).zero_()
            for _ in range(planes.count)
        )

    @property
    def slabs(self) -> tuple[torch.Tensor, ...]:
        return (*self.target, *self.draft)

    @property
    def sink_page(self) -> int:
        return self.pages - 1

    @property
    def usable_pages(self) -> int:
        return self.pages - RESERVED_PAGES

    @property
    def bytes(self) -> int:
        return self.pages * self.layout.page_bytes
