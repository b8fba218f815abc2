"""What a run keeps on disk so that the same command goes on where it was killed: records and settings.

Every write counts whole or not at all. Knows nothing about what the records say.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xspec.errors import CheckpointError, ConfigError

Record = Mapping[str, Any]


class Journal:
    """A JSONL file that grows by batches. How far it counts stands in `<name>.committed` beside it.

    What lies behind that mark is a batch that a kill cut short: it is dropped. A file without a mark counts
    as far as its lines are whole.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._mark = path, path.with_name(f"{path.name}.committed")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._bytes = self._committed()
        with path.open("ab") as file:
            file.truncate(self._bytes)
        write_atomically(self._mark, f"{self._bytes}\n")
        self.count = sum(1 for _ in self.read())

    def read(self, first: int = 0) -> Iterator[dict[str, Any]]:
        """The records from number `first` on. CheckpointError names a line that is none."""
        left = self._bytes
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                if left <= 0:
                    return
                left -= len(line)
                if number < first:
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise CheckpointError(f"{self.path} line {number + 1} is not JSON: {error}") from None
                if not isinstance(record, dict):
                    raise CheckpointError(f"{self.path} line {number + 1} is no JSON object")
                yield record

    def append(self, records: Sequence[Record]) -> None:
        """All of them or, after a kill, none."""
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
        with self.path.open("ab") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._bytes += len(text)
        write_atomically(self._mark, f"{self._bytes}\n")
        self.count += len(records)

    def _committed(self) -> int:
        size = self.path.stat().st_size if self.path.exists() else 0
        if not self._mark.exists():
            return self.path.read_bytes().rfind(b"\n") + 1 if size else 0
        text = self._mark.read_text(encoding="utf-8").strip()
        if not text.isdecimal() or int(text) > size:
            raise CheckpointError(f"{self.path} is {size} bytes long, but {self._mark.name} says {text!r}")
        return int(text)


@contextmanager
def hold(folder: Path, flag: str) -> Iterator[None]:
    """Keep other runs out of the folder of --`flag`, which is made if need be.

    ConfigError if one is there, or if nothing can be written. The lock ends with the process, in any case.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a")
    except OSError as error:
        raise ConfigError(f"--{flag}={folder} cannot be written: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--{flag}={folder} is in use by another xspec train") from None
        yield


def write_atomically(path: Path, text: str) -> None:
    """The file holds the old text or the new one, whenever the machine stops."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class State:
    """A small JSON file of settings by part of a run, and of the stages that are done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content: dict[str, Any] = {}
        if path.exists():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise CheckpointError(f"{path} is not JSON: {error}") from None
            if not isinstance(content, dict):
                raise CheckpointError(f"{path} holds no JSON object")
            self._content = content

    def settle(self, part: str, settings: Record, elsewhere: str) -> None:
        """Keep the settings of a part from now on: what comes was made with them. See `compare`."""
        self.compare(part, settings, elsewhere)
        self._content[part] = json.loads(json.dumps(settings))
        self._write()

    def compare(self, part: str, settings: Record, elsewhere: str) -> None:
        """ConfigError if the part was settled otherwise. It names every flag that changed, and `elsewhere`,
        the flag that asks for another folder."""
        wanted = json.loads(json.dumps(settings))
        before = self._content.get(part)
        if before is None:
            return
        changed = [
            f"--{name} was {_shown(before.get(name))} in {self.path.parent}, now {_shown(wanted.get(name))}"
            for name in sorted({*before, *wanted})
            if before.get(name) != wanted.get(name)
        ]
        if changed:
            raise ConfigError("\n".join([*changed, f"to change it, give another {elsewhere}"]))

    def done(self, stage: str) -> bool:
        return stage in self._content.get("done", [])

    def finish(self, stage: str) -> None:
        if not self.done(stage):
            self._content.setdefault("done", []).append(stage)
            self._write()

    def _write(self) -> None:
        write_atomically(self.path, json.dumps(self._content, indent=1, ensure_ascii=False) + "\n")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
