"""Measured costs kept in a directory (DEEPINFER_DECODE_PERF_CACHE_DIR), so that the next engine need not measure.

One JSON file a configuration, named by a digest of everything that decides the times: device, providers of the ops with
their versions, version of core, the model's shape, numerics and parallel sizes. Nothing in the directory is ever
deleted; a file of ours that is too old or not readable is measured anew and replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.speculate.costs import MeasuredCosts

logger = logging.getLogger("deepinfer.speculate")

_POINTS = ("rows", "step_ms", "sequences", "drafting_ms")


def stored_costs(
    directory: Path, key: Mapping[str, Any], seconds_valid: float, measure: Callable[[], MeasuredCosts]
) -> MeasuredCosts:
    """Costs of this key from the directory if they are young enough, else measured and stored."""
    text = json.dumps(key, sort_keys=True)
    path = directory / f"deepinfer-step-costs-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    found = _read(path, key, seconds_valid)
    if found is not None:
        return found
    costs = measure()
    _write(path, key, costs)
    return costs


def _read(path: Path, key: Mapping[str, Any], seconds_valid: float) -> MeasuredCosts | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        age = time.time() - float(record["time"])
        if record["key"] != json.loads(json.dumps(key)) or not 0 <= age <= seconds_valid:
            return None
        points = [np.array(record[name], dtype=np.float64) for name in _POINTS]
        if not all(len(p) and np.isfinite(p).all() and (p >= 0).all() for p in points):
            return None
        return MeasuredCosts(*points)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be used (%s); measuring anew", path, error)
        return None


def _write(path: Path, key: Mapping[str, Any], costs: MeasuredCosts) -> None:
    """Complete or not at all: other engines may read and write the same file."""
    record = {"key": dict(key), "time": time.time(), **{name: getattr(costs, name).tolist() for name in _POINTS}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("%s cannot be written (%s); the next engine measures again", path, error)
