"""A model as the kernels see it: its packed linears, layers and K/V, for timing them one by one.

The loader builds it as it builds every model; what was packed is noted on the way. No engine, no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from xspec.config import Config
from xspec.errors import ConfigError
from xspec.exec.assemble import check_abilities
from xspec.kernels.base import (
    AttentionShape,
    FusedLayers,
    Kernels,
    LayerWeights,
    NormWeights,
    PackedLinear,
    Rotary,
)
from xspec.kernels.quantised import Blocks
from xspec.models.base import Target
from xspec.models.loader import load_target
from xspec.models.locate import locate_model
from xspec.nn.inputs import ForwardInputs, Segment
from xspec.platform.base import Platform
from xspec.platform.select import select_platform
from xspec.progress import Progress
from xspec_cli.benchlib.kernel_timing import Case

FILL_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed weight [outs, ins] and what it weighs; `columns` is what comes out of it."""

    linear: PackedLinear
    outs: int
    ins: int
    columns: int
    bytes: int


class Recorder:
    """Kernels that note what is packed and fused; all the rest is the inner kernels' own."""

    def __init__(self, inner: Kernels) -> None:
        self._inner = inner
        self.packed: dict[int, Packed] = {}  # by id of the linear, in the order of packing
        self.layers: tuple[LayerWeights, ...] = ()
        self.shape: AttentionShape | None = None
        self.rotary: Rotary | None = None
        self.norm: NormWeights | None = None
        self.fused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        packed = self._inner.pack_linear(weight, bias)
        return self._note(packed, weight.shape, _bytes(weight, bias), gated=False)

    def pack_gated(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        packed = self._inner.pack_gated(weight, bias)
        return self._note(packed, weight.shape, _bytes(weight, bias), gated=True)

    def pack_blocks(
        self, blocks: Blocks, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> PackedLinear:
        size = blocks.q.numel() * blocks.bits // 8 + _bytes(blocks.scale, blocks.minimum, bias)
        return self._note(
            self._inner.pack_blocks(blocks, bias, gated=gated), blocks.q.shape, size, gated=gated
        )

    def fuse(
        self,
        layers: Sequence[LayerWeights],
        shape: AttentionShape,
        rotary: Rotary,
        norm: NormWeights | None,
    ) -> FusedLayers | None:
        fused = self._inner.fuse(layers, shape, rotary, norm)
        self.layers, self.shape, self.norm = tuple(layers), shape, norm
        self.rotary, self.fused = rotary, fused is not None
        return fused

    def _note(self, linear: PackedLinear, shape: torch.Size, size: int, *, gated: bool) -> PackedLinear:
        outs, ins = shape
        self.packed[id(linear)] = Packed(linear, outs, ins, outs // 2 if gated else outs, size)
        return linear


@dataclass(frozen=True, slots=True)
class KernelModel:
    platform: Platform
    kernels: Kernels
    target: Target
    dtype: torch.dtype
    shape: AttentionShape
    frequencies: torch.Tensor  # [D / 2]
    norm: NormWeights
    linears: dict[str, tuple[Packed, ...]]  # one of each name per layer, and the head
    slabs: tuple[torch.Tensor, ...]  # one per layer, filled
    pages: torch.Tensor  # [P] ids of their pages, shuffled
    block_size: int
    fused: bool  # the layers are one call

    @property
    def layer_bytes(self) -> int:
        """Weights of all layers and the final norm."""
        linears = sum(part.bytes for name, parts in self.linears.items() if name != "head" for part in parts)
        norms = 2 * self.target.spec.num_layers + 1
        return linears + norms * self.norm.weight.nbytes

    def inputs(self, case: Case) -> ForwardInputs:
        """Of a pass whose requests have `keys` tokens each, the last `rows` of which run."""
        pages = -(-case.keys // self.block_size)
        device = self.pages.device
        table = self.pages[: case.requests * pages].view(case.requests, pages)
        lanes = torch.arange(case.keys - case.rows, case.keys, device=device)
        slots = table[:, lanes // self.block_size] * self.block_size + lanes % self.block_size
        positions = lanes.repeat(case.requests)
        return ForwardInputs(
            positions=positions,
            slots=slots.reshape(-1),
            kv_lens=positions + 1,
            page_table=table,
            segments=(Segment(0, case.requests, case.rows, pages, 0),),
            sequences=torch.arange(case.requests, device=device).repeat_interleave(case.rows),
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.pages.device, dtype=torch.float32).to(self.dtype)


@torch.inference_mode()
def load_kernel_model(
    config: Config, cases: Sequence[Case], most_rows: int, progress: Progress
) -> KernelModel:
    """The model of `config` with K/V enough for each of `cases`, and to store `most_rows` rows.

    ConfigError names the flag that cannot be honoured.
    """
    platform = select_platform(config.execution.device, config.execution.cpu_kernels)
    dtype = check_abilities(config, platform)
    kernels = platform.kernels()
    recorder = Recorder(kernels)
    target = load_target(
        locate_model(config.model.model or None),
        cast(Kernels, recorder),
        dtype=dtype,
        device=platform.device(),
        quantization=config.model.quantization,
        progress=partial(progress, "loading"),
    )
    if target.spec.loops > 1 or target.spec.outer_layers:
        raise ConfigError(
            f"--model={config.model.model} is a looped target ({target.spec.model_type}), whose layers run "
            "several times over; --kernels takes targets whose layers run once"
        )
    shape, norm, rotary = recorder.shape, recorder.norm, recorder.rotary
    assert shape is not None and norm is not None  # every target fuses its layers, or asks to
    assert isinstance(rotary, torch.Tensor)
    block = config.cache.block_size
    pages = max([-(-most_rows // block), *(case.requests * -(-case.keys // block) for case in cases)])
    slabs = _filled_slabs(platform, kernels, target, pages, block, dtype)
    shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(platform.device())
    return KernelModel(
        platform=platform,
        kernels=kernels,
        target=target,
        dtype=dtype,
        shape=shape,
        frequencies=rotary,
        norm=norm,
        linears=_by_name(recorder),
        slabs=slabs,
        pages=shuffled,
        block_size=block,
        fused=recorder.fused,
    )


def _by_name(recorder: Recorder) -> dict[str, tuple[Packed, ...]]:
    rest = dict(recorder.packed)
    named: dict[str, tuple[Packed, ...]] = {}
    for name in ("qkv", "output", "gate_up", "down"):
        named[name] = tuple(rest.pop(id(getattr(layer, name))) for layer in recorder.layers)
    (head,) = rest.values()
    return {**named, "head": (head,)}


def _filled_slabs(
    platform: Platform, kernels: Kernels, target: Target, pages: int, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """With numbers in every slot: memory that was never written is not read from memory either."""
    planes = target.spec.planes
    needed = planes.token_elements * dtype.itemsize * pages * block
    free, _ = platform.memory_bytes()
    if needed > free:
        raise ConfigError(
            f"--kernel_requests and --kernel_context need {needed} bytes of K/V, {free} are free: "
            "give fewer or smaller ones"
        )
    device = platform.device()
    kv = torch.randn(min(FILL_ROWS, pages * block), 2 * planes.kv_heads, planes.head_dim, device=device)
    kv = kv.to(dtype)
    slabs = []
    for _ in range(planes.count):
        slab = kernels.kv_slab(pages, block, planes.kv_heads, planes.head_dim, dtype)
        for start in range(0, pages * block, len(kv)):
            slots = torch.arange(start, min(start + len(kv), pages * block), device=device)
            kernels.store_kv(slab, kv[: len(slots)], slots)
        slabs.append(slab)
    return tuple(slabs)


def _bytes(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
