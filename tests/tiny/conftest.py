"""The scripts of examples/tiny import each other by plain names, as they do when a person runs them."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = str(Path(__file__).resolve().parents[2] / "examples" / "tiny")
if SCRIPTS not in sys.path:
    sys.path.insert(0, SCRIPTS)
