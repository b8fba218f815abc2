"""Gumbel noise as a pure function of (seed, choice, position, token id).

No generator state and no draw order: a row gets the same noise alone, in any batch, in any round and
for any subset of the vocabulary, which is what makes text independent of the plan. Knows nothing
about logits or sampling rules.
"""

from __future__ import annotations

import torch

_MASK64 = (1 << 64) - 1

# Finaliser constants of splitmix64 (Steele, Lea, Flood 2014; Vigna's public-domain code).
_GOLDEN64 = 0x9E3779B97F4A7C15
_SPLITMIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

# lowbias32 (C. Wellons, hash-prospector, public domain): x^=x>>16; *; x^=x>>15; *; x^=x>>16.
_MUL_A = 0x7FEB352D
_MUL_B = 0x846CA68B - (1 << 32)
# Odd steps of the two key words per position (golden ratio; murmur3's first finaliser constant).
_STEP = (0x9E3779B9 - (1 << 32), 0x85EBCA6B - (1 << 32))

# u = k * _SCALE + _HALF for k in [0, 2^31): never 0, and never 1 although float32(2^31 - 1) is 2^31.
_SCALE = (1.0 - 2.0**-24) * 2.0**-31
_HALF = 2.0**-32


def row_keys(seed: int, choice: int) -> tuple[int, int]:
    """Two 32-bit key words (as signed ints) of one choice of a request.

    Every Python int is a valid seed: negative ones and those past 64 bits are absorbed limb by limb
    in two's complement, so none is refused and no two are folded together by truncation.
    """
    limbs = seed.bit_length() // 64 + 1
    state = _GOLDEN64
    raw = seed.to_bytes(8 * limbs, "little", signed=True)
    for start in range(0, len(raw), 8):
        state = _mix64(state ^ int.from_bytes(raw[start : start + 8], "little"))
    state = _mix64(state ^ _mix64(choice))
    return _signed32(state & 0xFFFFFFFF), _signed32(state >> 32)


def _mix64(value: int) -> int:
    z = (value + _GOLDEN64) & _MASK64
    z = ((z ^ (z >> 30)) * _SPLITMIX[0]) & _MASK64
    z = ((z ^ (z >> 27)) * _SPLITMIX[1]) & _MASK64
    return z ^ (z >> 31)


def _signed32(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


class Scratch:
    """Named [rows, width] buffers that only grow: fresh ones of this size cost page faults each call."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._width = width
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised [rows, width]; what was taken under this name before is overwritten."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.shape[0] < rows:
            buffer = torch.empty(rows, self._width, dtype=dtype, device=self._device)
            self._buffers[(name, dtype)] = buffer
        return buffer[:rows]


class _Mixer:
    """lowbias32 rounds in place on int32 (multiplies wrap).

    Constants are int32 tensors on the device: a Python scalar costs a conversion at every use.
    """

    def __init__(self, device: torch.device) -> None:
        def word(value: int) -> torch.Tensor:
            return torch.tensor(value, dtype=torch.int32, device=device)

        self._mul_a, self._mul_b = word(_MUL_A), word(_MUL_B)
        self._shift_16, self._mask_16 = word(16), word(0xFFFF)
        self._shift_15, self._mask_15 = word(15), word(0x1FFFF)

    def mix(self, x: torch.Tensor, t: torch.Tensor, key: torch.Tensor | None = None) -> torch.Tensor:
        """One round on x with scratch t of its shape; `key` is added halfway."""
        self._fold(x, t, self._shift_16, self._mask_16)
        x.mul_(self._mul_a)
        if key is not None:
            x.add_(key)
        self._fold(x, t, self._shift_15, self._mask_15)
        x.mul_(self._mul_b)
        self._fold(x, t, self._shift_16, self._mask_16)
        return x

    @staticmethod
    def _fold(x: torch.Tensor, t: torch.Tensor, shift: torch.Tensor, mask: torch.Tensor) -> None:
        """x ^= x >>> shift. torch shifts int32 arithmetically; the mask clears the copied sign bits."""
        torch.bitwise_right_shift(x, shift, out=t)
        x.bitwise_xor_(t.bitwise_and_(mask))


class GumbelNoise:
    """Noise over one vocabulary on one device. The first mixing round of each id is a table."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._mixer = _Mixer(device)
        # The Weyl step keeps id 0 away from the fixed point of the mixer.
        ids = (torch.arange(vocab_size, dtype=torch.int32, device=device) + 1) * _STEP[0]
        self._id_hash = self._mixer.mix(ids, torch.empty_like(ids))
        self._step = torch.tensor(_STEP, dtype=torch.int32, device=device)
        self._positive = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=device)
        self._scratch = Scratch(vocab_size, device)

    def gumbel(
        self,
        keys: torch.Tensor,  # [N, 2] int32, from row_keys
        positions: torch.Tensor,  # [N] absolute positions
        ids: torch.Tensor | None = None,  # [N, M] token ids; None: the whole vocabulary in order
        *,
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Standard Gumbel noise [N, M] (or [N, vocab]) in float32, or float64 from the same bits."""
        bits = self._bits(keys, positions, ids)
        noise = torch.empty(bits.shape, dtype=dtype, device=bits.device) if out is None else out
        noise.copy_(bits)
        # E = -log1p(-u) is exponential with 31 bits of resolution near 0, where large noise comes from.
        return noise.mul_(-_SCALE).sub_(_HALF).log1p_().neg_().log_().neg_()

    def _bits(self, keys: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """31 uniform bits per (row, id): the id's hash, keyed by two words, through a second round."""
        rows = keys.shape[0]
        words = keys + positions.to(torch.int32).unsqueeze(1) * self._step
        self._mixer.mix(words, torch.empty_like(words))
        first, second = words[:, :1], words[:, 1:]
        if ids is None:
            x = self._scratch.take("x", rows, torch.int32)
            t = self._scratch.take("t", rows, torch.int32)
            torch.bitwise_xor(self._id_hash, first, out=x)
        else:
            x = self._id_hash[ids].bitwise_xor_(first)
            t = torch.empty_like(x)
        return self._mixer.mix(x, t, second).bitwise_and_(self._positive)
