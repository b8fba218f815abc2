"""The captured dataset: what the target read, wrote and computed, as flat memory-mapped files.

Appended one sequence at a time and resumable after a crash. Knows nothing about models or losses.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch

from xspec.errors import CheckpointError, ConfigError

VERSION = 1
MANIFEST, TOKENS, HIDDEN, TAPS = "manifest.json", "tokens.bin", "hidden.bin", "taps.bin"
LOG_Z, SEQUENCES = "log_z.bin", "sequences.bin"
HELD_OUT, SAMPLED = 1, 2
_RECORD_BYTES = 4 * 8


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """Whose states a dataset holds. Tap i is the residual stream after i layers."""

    target: str
    target_digest: str
    hidden_size: int
    vocab_size: int
    taps: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> dict[str, int]:
        """Bytes one token takes in each file."""
        wide = 2 * self.hidden_size
        return {TOKENS: 4, HIDDEN: wide, TAPS: wide * len(self.taps), LOG_Z: 4}


@dataclass(frozen=True, slots=True)
class Captured:
    """One sequence of L tokens, the first `prompt_len` of them the prompt.

    `hidden` of a row predicts the next token: softmax(hidden . E^T), whose log-normaliser is `log_z`.
    """

    tokens: torch.Tensor  # [L] int32
    hidden: torch.Tensor  # [L, H] bf16, after the target's final norm
    taps: torch.Tensor  # [L, m, H] bf16
    log_z: torch.Tensor  # [L] fp32: logsumexp of the target's full-vocabulary logits at this row
    prompt_len: int
    held_out: bool = False
    sampled: bool = False  # answered at a temperature above 0


class Writer:
    """Appends sequences; opening an existing dataset continues after its last complete sequence."""

    def __init__(self, path: Path, spec: DatasetSpec) -> None:
        self._path, self.spec = path, spec
        path.mkdir(parents=True, exist_ok=True)
        if (path / MANIFEST).exists():
            _check(path, _read_manifest(path)[0], spec)
        records, self.tokens = _complete(path, spec)
        self.sequences = len(records)
        sizes = {name: size * self.tokens for name, size in spec.row_bytes.items()}
        self._files: dict[str, FileIO] = {}
        for name, size in {**sizes, SEQUENCES: _RECORD_BYTES * self.sequences}.items():
            file = FileIO(path / name, "ab")
            file.truncate(size)
            self._files[name] = file
        self.flush()

    def append(self, captured: Captured) -> None:
        """The sequence counts once its record, written last, is whole."""
        length = captured.tokens.shape[0]
        hidden, taps = self.spec.hidden_size, len(self.spec.taps)
        _expect("tokens", captured.tokens, (length,), torch.int32)
        _expect("hidden", captured.hidden, (length, hidden), torch.bfloat16)
        _expect("taps", captured.taps, (length, taps, hidden), torch.bfloat16)
        _expect("log_z", captured.log_z, (length,), torch.float32)
        if not 0 <= captured.prompt_len <= length or length == 0:
            raise ValueError(f"a prompt of {captured.prompt_len} tokens in a sequence of {length}")
        for name, rows in (
            (TOKENS, captured.tokens),
            (HIDDEN, captured.hidden.view(torch.int16)),
            (TAPS, captured.taps.view(torch.int16)),
            (LOG_Z, captured.log_z),
        ):
            self._write(name, rows.cpu().contiguous().numpy())
        flags = HELD_OUT * captured.held_out + SAMPLED * captured.sampled
        record = (self.tokens, length, captured.prompt_len, flags)
        self._write(SEQUENCES, np.array(record, dtype=np.int64))
        self.tokens += length
        self.sequences += 1

    def flush(self) -> None:
        """Make what was appended visible to readers and safe against a crash of the machine."""
        for file in self._files.values():
            os.fsync(file.fileno())
        manifest = {
            "version": VERSION,
            **asdict(self.spec),
            "tokens": self.tokens,
            "sequences": self.sequences,
        }
        partial = self._path / f"{MANIFEST}.partial"
        partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._path / MANIFEST)

    def close(self) -> None:
        self.flush()
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, name: str, rows: np.ndarray) -> None:
        left = memoryview(rows.tobytes())
        while left:
            left = left[self._files[name].write(left) :]


class Reader:
    """The sequences a dataset held when it was opened, as views of memory-mapped files."""

    def __init__(self, path: Path, expected: DatasetSpec | None = None, *, limit: int | None = None) -> None:
        """Of the first `limit` sequences only, if given.

        CheckpointError if the files do not fit their manifest, or the manifest does not fit `expected`.
        """
        self.spec, self.tokens, sequences = _read_manifest(path)
        if expected is not None:
            _check(path, self.spec, expected)
        hidden, taps = self.spec.hidden_size, len(self.spec.taps)
        self._records = _map(path / SEQUENCES, np.int64, (sequences, 4))
        self._tokens = _map(path / TOKENS, np.int32, (self.tokens,))
        self._hidden = _map(path / HIDDEN, np.int16, (self.tokens, hidden)).view(torch.bfloat16)
        self._taps = _map(path / TAPS, np.int16, (self.tokens, taps, hidden)).view(torch.bfloat16)
        self._log_z = _map(path / LOG_Z, np.float32, (self.tokens,))
        self._records = self._records[:limit]
        flags = self._records[:, 3]
        self.held_out = torch.nonzero(flags & HELD_OUT).flatten().tolist()
        self.training = torch.nonzero((flags & HELD_OUT) == 0).flatten().tolist()

    def __len__(self) -> int:
        return self._records.shape[0]

    def sequence(self, index: int) -> Captured:
        start, length, prompt_len, flags = self._records[index].tolist()
        rows = slice(start, start + length)
        return Captured(
            self._tokens[rows],
            self._hidden[rows],
            self._taps[rows],
            self._log_z[rows],
            prompt_len,
            bool(flags & HELD_OUT),
            bool(flags & SAMPLED),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole sequences packed one after the other: N rows. `generator` is the step's only randomness."""

    tokens: torch.Tensor  # [N] int64
    hidden: torch.Tensor  # [N, H] bf16
    taps: torch.Tensor  # [N, m, H] bf16
    log_z: torch.Tensor  # [N] fp32
    starts: tuple[int, ...]  # first row of each sequence, and N at the end
    prompt_lens: tuple[int, ...]
    generator: torch.Generator  # on the CPU, so that a seed means the same everywhere

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first row, one past the last) of each sequence."""
        return list(zip(self.starts[:-1], self.starts[1:], strict=True))


def pack(sequences: Sequence[Captured], generator: torch.Generator, device: torch.device) -> Batch:
    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + sequence.tokens.shape[0])
    return Batch(
        torch.cat([sequence.tokens for sequence in sequences]).to(device, torch.int64),
        torch.cat([sequence.hidden for sequence in sequences]).to(device),
        torch.cat([sequence.taps for sequence in sequences]).to(device),
        torch.cat([sequence.log_z for sequence in sequences]).to(device),
        tuple(starts),
        tuple(sequence.prompt_len for sequence in sequences),
        generator,
    )


def count_answer_tokens(reader: Reader) -> torch.Tensor:
    """[V] int64: how often each token occurs in the answers of the training sequences."""
    counts = torch.zeros(reader.spec.vocab_size, dtype=torch.int64)
    for sequence in map(reader.sequence, reader.training):
        answer = sequence.tokens[sequence.prompt_len :].long()
        counts += torch.bincount(answer, minlength=reader.spec.vocab_size)
    return counts


def choose_draft_vocab(counts: torch.Tensor, size: int, always: Iterable[int] = ()) -> torch.Tensor:
    """The [size] ids drafts may use, ascending: `always`, then the most counted, ties by the lower id.

    Frequency-ranked as in FR-Spec (arXiv 2502.14856). ConfigError if `size` does not fit `counts` [V].
    """
    kept = sorted(set(always))
    if not max(1, len(kept)) <= size <= counts.shape[0]:
        raise ConfigError(f"draft_vocab_size is {size}, allowed: {max(1, len(kept))} to {counts.shape[0]}")
    rank = counts.clone()
    rank[kept] = torch.iinfo(torch.int64).max
    return torch.sort(rank, descending=True, stable=True).indices[:size].sort().values


def _read_manifest(path: Path) -> tuple[DatasetSpec, int, int]:
    """The spec, and how many tokens and sequences readers may count on."""
    file = path / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content.pop("version")
        tokens, sequences = int(content.pop("tokens")), int(content.pop("sequences"))
        spec = DatasetSpec(**{**content, "taps": tuple(content["taps"])})
    except FileNotFoundError:
        raise CheckpointError(f"{path} holds no captured dataset: {MANIFEST} is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a dataset manifest: {error!r}") from None
    if version != VERSION:
        raise CheckpointError(f"{file}: version is {version!r}, this release reads {VERSION}")
    return spec, tokens, sequences


def _check(path: Path, found: DatasetSpec, expected: DatasetSpec) -> None:
    have, want = asdict(found), asdict(expected)
    wrong = [f"{key} is {have[key]!r}, not {want[key]!r}" for key in want if have[key] != want[key]]
    if wrong:
        raise CheckpointError(f"the dataset in {path} is of something else: {'; '.join(wrong)}")


def _complete(path: Path, spec: DatasetSpec) -> tuple[np.ndarray, int]:
    """The records whose rows are in all files, and how many tokens those hold."""
    sizes = {name: (path / name).stat().st_size if (path / name).exists() else 0 for name in spec.row_bytes}
    whole = min(sizes[name] // size for name, size in spec.row_bytes.items() if size)
    file = path / SEQUENCES
    raw = file.read_bytes() if file.exists() else b""
    count = len(raw) // _RECORD_BYTES
    records = np.frombuffer(raw[: count * _RECORD_BYTES], dtype=np.int64).reshape(-1, 4)
    ends = records[:, 0] + records[:, 1]
    count = int((ends <= whole).sum())  # ends only grow
    return records[:count], int(ends[count - 1]) if count else 0


def _map(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> torch.Tensor:
    need = int(np.prod(shape)) * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.exists() else 0
    if size < need:
        raise CheckpointError(f"{path} is {size} bytes long, its manifest needs {need}")
    if need == 0:
        return torch.from_numpy(np.zeros(shape, dtype))
    # Copy-on-write: torch takes no read-only array, and the file must stay as it is.
    return torch.from_numpy(np.memmap(path, dtype, "c", shape=shape))


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
