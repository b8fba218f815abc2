"""Cost tables in the user's cache folder, for launches that name none: found again by what they hold for.

A table that is missing or cannot be used is measured again; a folder that cannot be written is only told of.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xspec.cost.bundle import Bundle, read_bundle, write_bundle
from xspec.cost.settings import Control, Effective, to_json
from xspec.errors import CalibrationError

log = logging.getLogger(__name__)


def cache_path(
    fingerprint: Mapping[str, Any], effective: Effective, environ: Mapping[str, str] | None = None
) -> Path:
    """$XDG_CACHE_HOME (or ~/.cache)/xspec/cost_tables/<control>-<digest of fingerprint and settings>.json."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME", "")
    # a relative path is to be ignored, says the XDG Base Directory Specification
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    facts = {"fingerprint": dict(fingerprint), "settings": to_json(effective.as_settings())}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return root / "xspec" / "cost_tables" / f"{effective.geometry.control}-{digest}.json"


def read_cached(
    path: Path,
    fingerprint: Mapping[str, Any],
    effective: Effective,
    *,
    control: Control,
    algorithm: str,
    draft_width: int,
) -> Bundle | None:
    """The table kept there, or None if there is none of use; a warning says what is wrong with one."""
    if not os.path.lexists(path):
        return None
    try:
        bundle = read_bundle(
            path,
            flag="",
            control=control,
            algorithm=algorithm,
            draft_width=draft_width,
            fingerprint=fingerprint,
        ).bundle
    except CalibrationError as error:
        log.warning("the cost table kept in the cache cannot be used and is measured again: %s", error)
        return None
    if bundle is None or to_json(bundle.effective.as_settings()) != to_json(effective.as_settings()):
        log.warning("the cost table kept in the cache is of other settings and is measured again: %s", path)
        return None
    return bundle


def keep(path: Path, bundle: Bundle) -> None:
    """Put a table there in place of what may be there; a warning where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        write_bundle(path, bundle)
    except (OSError, CalibrationError) as error:
        log.warning("measured costs are not kept, the next start measures again: %s", error)
    else:
        log.info("measured costs are kept in %s", path)
