"""GGUF block types that are kept as they are in the file: bytes of rows -> Blocks of exactly their values.

Q4_K and Q5_K multiply a super-block's fp16 scale by 6-bit ones: such products need fp32, and fit it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from xspec.kernels.quantised import Blocks

Bytes = np.ndarray  # uint8 [rows, blocks, bytes of a block]


def kept_kinds() -> frozenset[Kind]:
    return frozenset(_READERS)


def read_blocks(stored: Bytes, kind: Kind) -> Blocks:
    """stored uint8 [rows, bytes of a row], of a kind that is kept."""
    block_bytes = GGML_QUANT_SIZES[kind][1]
    return _READERS[kind](stored.reshape(stored.shape[0], -1, block_bytes))


def _q4_0(stored: Bytes) -> Blocks:
    return Blocks(4, _values(_nibbles(stored[..., 2:])), _half(stored, 0))


def _q4_1(stored: Bytes) -> Blocks:
    return Blocks(4, _values(_nibbles(stored[..., 4:])), _half(stored, 0), _half(stored, 2))


def _q5_0(stored: Bytes) -> Blocks:
    """Values are q - 16: in 8 bits, where 128 stands for 0, that is q + 112."""
    q = _nibbles(stored[..., 6:]) | _fifth_bits(stored[..., 2:6])
    return Blocks(8, _values(q + np.uint8(112)), _half(stored, 0))


def _q5_1(stored: Bytes) -> Blocks:
    q = _nibbles(stored[..., 8:]) | _fifth_bits(stored[..., 4:8])
    return Blocks(8, _values(q), _half(stored, 0), _half(stored, 2))


def _q8_0(stored: Bytes) -> Blocks:
    return Blocks(8, _values(stored[..., 2:] ^ np.uint8(128)), _half(stored, 0))


def _q4_k(stored: Bytes) -> Blocks:
    scale, minimum = _super_scales(stored)
    return Blocks(4, _values(_super_nibbles(stored[..., 16:])), scale, minimum)


def _q5_k(stored: Bytes) -> Blocks:
    scale, minimum = _super_scales(stored)
    high = np.unpackbits(stored[..., 16:48, None], axis=-1, bitorder="little")  # [.., 32 values, 8 groups]
    q = _super_nibbles(stored[..., 48:]).reshape(*stored.shape[:2], 8, 32) | np.swapaxes(high, -1, -2) << 4
    return Blocks(8, _values(q), scale, minimum)


_READERS: dict[Kind, Callable[[Bytes], Blocks]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
}


def _values(q: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(q).reshape(q.shape[0], -1))


def _half(stored: Bytes, at: int) -> torch.Tensor:
    """[rows, blocks]: the fp16 at byte `at` of each block."""
    return torch.from_numpy(np.ascontiguousarray(stored[..., at : at + 2]).view(np.float16)[..., 0])


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The first half of a block lies in the low nibbles, the second in the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _super_nibbles(packed: np.ndarray) -> np.ndarray:
    """[.., 128] -> [.., 256]: each 32 bytes hold a group in their low nibbles, the next in the high ones."""
    return _nibbles(packed.reshape(*packed.shape[:-1], 4, 32)).reshape(*packed.shape[:-1], 256)


def _super_scales(stored: Bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum [rows, 8 * blocks] fp32 of the groups of super-blocks: two fp16, then 8 times 6 bits
    each for scales and minima."""
    packed = stored[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6) << 4), axis=-1)
    minima = np.concatenate((second & 63, (third >> 4) | (second >> 6) << 4), axis=-1)
    rows = stored.shape[0]
    scale = _half(stored, 0).float()[..., None] * torch.from_numpy(scales).float()
    minimum = -_half(stored, 2).float()[..., None] * torch.from_numpy(minima).float()
    return scale.view(rows, -1), minimum.view(rows, -1)
