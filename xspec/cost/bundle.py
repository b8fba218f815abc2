"""Saved cost tables: written once and atomically, loaded only where every fact they were measured on agrees.

MTP, DSpark, draft widths and controls never mix (architecture decision 10). What the facts are is the
caller's business; nothing here looks at a device.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xspec.cost.bundle_json import FORMAT, VERSION, Bundle, decode, effective_json, encode
from xspec.cost.bundle_raw import RawBundle, read_raw
from xspec.cost.legacy import bare_table, everywhere, read_bare
from xspec.cost.model import CostTable
from xspec.cost.read import read_json
from xspec.cost.settings import CalibrationSettings, Control, parse_calibration
from xspec.errors import CalibrationError

__all__ = [
    "Bundle",
    "SavedCosts",
    "bare_table",
    "check_output",
    "effective_json",
    "peek_settings",
    "read_bundle",
    "read_saved_costs",
    "write_bundle",
]

SOFT_KEYS = ("torch_patch", "driver")
"""Facts of a fingerprint that may change with a warning: costs hardly depend on them."""

PAIRS_KEY = "pairs"
"""A fact that a table may have more of than is launched: every (K, d) is measured by itself."""

DOING = {
    Control.DRAFT_STEP: "adapting draft steps",
    Control.TARGET_VERIFY: "adapting target verification",
    Control.SPEC: "choosing (K, d)",
}

BARE_ALGORITHM = "DSpark"
"""What bare tables were measured with: target verification of no other algorithm ever used them."""


@dataclass(frozen=True, slots=True)
class SavedCosts:
    """Costs from a file. `bundle` is None for a bare legacy table; `warnings` are for the log."""

    table: CostTable
    control: Control
    algorithm: str
    draft_width: int
    bundle: Bundle | None
    warnings: tuple[str, ...] = ()


# -- writing --------------------------------------------------------------------------------------


def check_output(path: Path, *, flag: str = "") -> None:
    """CalibrationError if a table could not be written there; to be asked before any work is done for it."""
    where, folder = _where(path, flag), path.parent
    if os.path.lexists(path):
        raise CalibrationError(f"{where}: exists already and is not overwritten; name a new file")
    if not folder.is_dir():
        state = "is not a folder" if os.path.lexists(folder) else "does not exist"
        raise CalibrationError(f"{where}: {folder} {state}; create the folder first")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CalibrationError(f"{where}: cannot write in {folder}: {error.strerror or error}") from error


def write_bundle(path: Path, bundle: Bundle, *, flag: str = "") -> None:
    """Write a whole bundle or nothing. CalibrationError if the file exists or cannot be written."""
    check_output(path, flag=flag)
    content = json.dumps(encode(bundle), indent=1, allow_nan=False) + "\n"
    try:
        _write_new(path, content.encode())
    except FileExistsError as error:
        raise CalibrationError(f"{_where(path, flag)}: exists already and is not overwritten") from error
    except OSError as error:
        raise CalibrationError(
            f"{_where(path, flag)}: cannot be written: {error.strerror or error}"
        ) from error


def _write_new(path: Path, content: bytes) -> None:
    """FileExistsError if `path` exists by now; else it is there with all its content, at once."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        _place(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _place(name: str, path: Path) -> None:
    """Give a file its final name, which nobody may have taken."""
    try:
        os.link(name, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links: take the name first, then move over what was taken
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        try:
            os.replace(name, path)
        except OSError:
            os.unlink(path)
            raise


# -- reading --------------------------------------------------------------------------------------


def read_bundle(
    path: Path,
    *,
    flag: str,
    control: Control,
    algorithm: str,
    draft_width: int,
    fingerprint: Mapping[str, Any],
    soft_keys: Collection[str] = SOFT_KEYS,
) -> SavedCosts:
    """The costs saved at `path`, for a launch that is what the keywords say.

    CalibrationError, with every reason at once, if the file is no cost table, was measured for another
    control, algorithm or width, differs in any fact of the fingerprint but the soft ones, or contradicts
    itself. Where (K, d) is chosen, the table may have more of them than the launch, of other widths too. A
    bare legacy table has no fingerprint: its width counts, and a warning says that nothing else was checked.
    """
    where = _where(path, flag)
    content = _content(path, where)
    if "format" not in content:
        costs = _bare(content, where)
        if strangers := _strangers(costs, control, algorithm, draft_width):
            raise CalibrationError(f"{where} was not measured on what is launched", [*strangers.values()])
        return costs
    raw = _raw(content, where)
    strangers = _strangers(raw, control, algorithm, draft_width)
    hard, soft = _differences(raw.fingerprint, fingerprint, soft_keys, told=strangers)
    if strangers or hard:
        raise CalibrationError(f"{where} was not measured on what is launched", [*strangers.values(), *hard])
    return _costs(decode(raw, where), tuple(f"{where}: {difference}" for difference in soft))


def read_saved_costs(path: Path, *, flag: str) -> SavedCosts:
    """The costs saved at `path` wherever they were measured: to look at or simulate, not to serve by.

    CalibrationError if the file is no cost table or contradicts itself.
    """
    where = _where(path, flag)
    content = _content(path, where)
    return _bare(content, where) if "format" not in content else _costs(decode(_raw(content, where), where))


def peek_settings(path: Path, *, flag: str) -> CalibrationSettings:
    """The settings a saved table was measured by, so that the same can be captured before it is loaded.

    Of a bare legacy table no more than its width is known.
    """
    where = _where(path, flag)
    content = _content(path, where)
    if "format" not in content:
        return CalibrationSettings(draft_width=read_bare(content, where)[1], plain_rounds=False)
    return parse_calibration(_raw(content, where).settings, f"{where}: settings")


def _where(path: Path, flag: str) -> str:
    return f"--{flag.lstrip('-')}={path}" if flag else str(path)


def _content(path: Path, where: str) -> dict[str, Any]:
    try:
        content = read_json(path.read_bytes())
    except OSError as error:
        raise CalibrationError(f"{where}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # JSON and encoding errors are ValueErrors
        raise CalibrationError(f"{where}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CalibrationError(f"{where}: allowed: a JSON object, found {type(content).__name__}")
    return content


def _raw(content: Mapping[str, Any], where: str) -> RawBundle:
    found = (content["format"], content.get("version"))
    if found != (FORMAT, VERSION) or isinstance(found[1], bool):
        raise CalibrationError(
            f"{where}: format {found[0]!r}, version {found[1]!r}; read are {FORMAT!r}, version {VERSION}, "
            "and bare tables without a format"
        )
    return read_raw(content, where)


def _costs(bundle: Bundle, warnings: tuple[str, ...] = ()) -> SavedCosts:
    return SavedCosts(
        bundle.table, bundle.control, bundle.algorithm, bundle.draft_width, bundle=bundle, warnings=warnings
    )


def _strangers(
    raw: RawBundle | SavedCosts, control: Control, algorithm: str, draft_width: int
) -> dict[str, str]:
    """Why the table is of another kind altogether, in sentences by what differs."""
    reasons = {}
    if raw.control != control:
        reasons["control"] = f"it is for {DOING[Control(raw.control)]}, but this launch is {DOING[control]}"
    if raw.algorithm != algorithm:
        reasons["algorithm"] = (
            f"it was measured with {raw.algorithm} drafts, but this launch drafts with {algorithm}: "
            "their costs never stand for each other"
        )
    if raw.draft_width != draft_width and control is not Control.SPEC:
        reasons["draft_width"] = (
            f"it was measured with {raw.draft_width} drafts a request, but this launch has {draft_width}: "
            "costs of one width never stand for another"
        )
    return reasons


def _differences(
    saved: Mapping[str, Any], launched: Mapping[str, Any], soft_keys: Collection[str], told: Collection[str]
) -> tuple[list[str], list[str]]:
    """(hard, soft) differences of two fingerprints by key, each with both values."""
    ours, theirs = _facts(saved), _facts(launched)
    hard: list[str] = []
    soft: list[str] = []
    paired = PAIRS_KEY in ours and PAIRS_KEY in theirs
    for key in sorted({*ours, *theirs} - {*told}):
        if paired and key in (PAIRS_KEY, "draft_width"):
            if key == PAIRS_KEY and (missing := _missing_pairs(saved[key], launched[key])):
                hard.append(f"{key}: the table lacks {missing}, which this launch may choose")
            continue
        one, two = ours.get(key, "nothing"), theirs.get(key, "nothing")
        if one != two:
            (soft if key in soft_keys else hard).append(f"{key}: the table has {one}, this launch {two}")
    return hard, soft


def _missing_pairs(saved: Any, launched: Any) -> str:
    """What of the launch the table has no costs of; both are lists in a string, as the fingerprint has it."""
    there = str(saved).split(",")
    return ", ".join(pair for pair in str(launched).split(",") if pair not in there)


def _facts(fingerprint: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Facts by dotted key, as the JSON they are saved as."""
    found: dict[str, str] = {}
    for key, value in fingerprint.items():
        if isinstance(value, Mapping):
            found |= _facts(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = json.dumps(value)
    return found


def _bare(content: Mapping[str, Any], where: str) -> SavedCosts:
    curve, width = read_bare(content, where)
    warning = (
        f"{where}: a bare table has no fingerprint; that it was measured on this model, device and settings "
        "was not checked, and it holds for all KV lengths"
    )
    if "draft_width" not in content:
        warning += f"; it does not say its draft width, which means {width}"
    table = everywhere(curve, width)
    return SavedCosts(table, Control.TARGET_VERIFY, BARE_ALGORITHM, width, bundle=None, warnings=(warning,))
