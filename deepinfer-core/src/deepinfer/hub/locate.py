"""Finds the local directory of a model: a directory, or a hub id looked up in the cache and downloaded if allowed.

Called once at start-up, before anything is read. A directory is itself: an argument goes before the environment. A hub
id is the local copy that `DEEPINFER_HF_MODEL_DIR` names; else the hub cache; else, unless `HF_HUB_OFFLINE` forbids it,
the hub. It knows which files belong to a checkpoint, not what is in them.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from deepinfer.errors import CheckpointError
from deepinfer.hub.safetensors_index import INDEX_NAME, SINGLE_NAME

MODEL_DIR_VARIABLE = "DEEPINFER_HF_MODEL_DIR"

CHECKPOINT = "checkpoint"
CONFIG = "config"
TOKENIZER = "tokenizer"
_PATTERNS = {
    CHECKPOINT: ["*.json", "*.safetensors", "encoding/*"],
    CONFIG: ["config.json"],
    TOKENIZER: ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"],
}
_HUB_ID = re.compile(r"^[\w][\w.-]*(/[\w][\w.-]*)?$")
_logger = logging.getLogger(__name__)


def locate(
    model: str | Path, revision: str | None = None, environ: Mapping[str, str] | None = None, want: str = CHECKPOINT
) -> Path:
    """Directory with the files of `model`, a directory or a hub id.

    `want` is CHECKPOINT, CONFIG (config.json is enough) or TOKENIZER (tokenizer files are enough, and
    `DEEPINFER_HF_MODEL_DIR` does not apply). `revision` selects a branch, tag or commit of a hub id. Raises
    CheckpointError saying what was looked for where.
    """
    environ = os.environ if environ is None else environ
    path = Path(model).expanduser()
    if str(model) and path.is_dir():
        return _require_files(path, want)
    if path.is_file():
        raise CheckpointError(f"model: found {str(model)!r}, which is a file, expected a directory or a hub id")
    if not _HUB_ID.match(str(model)):
        raise CheckpointError(f"model: found no directory {str(model)!r}, and it is no hub id (owner/name) either")
    if want != TOKENIZER and environ.get(MODEL_DIR_VARIABLE):
        return _local_copy(Path(environ[MODEL_DIR_VARIABLE]).expanduser(), want)
    return _from_hub(str(model), revision, environ, want)


def _local_copy(directory: Path, want: str) -> Path:
    """The directory that stands for a hub id."""
    if not directory.is_dir():
        raise CheckpointError(f"{MODEL_DIR_VARIABLE}={directory}: found no such directory, expected a checkpoint")
    _logger.info("model files are read from %s (%s)", directory, MODEL_DIR_VARIABLE)
    return _require_files(directory, want)


def _require_files(directory: Path, want: str) -> Path:
    needed = "tokenizer.json" if want == TOKENIZER else "config.json"
    if (directory / needed).is_file():
        return directory
    held = sorted(entry.name for entry in directory.iterdir())[:8]
    raise CheckpointError(f"{directory}: found no {needed} there (it holds {held or 'nothing'}), expected a checkpoint")


def _from_hub(model: str, revision: str | None, environ: Mapping[str, str], want: str) -> Path:
    cached = _cached(model, revision, environ, want)
    offline = _is_offline(environ)
    if cached is not None and (offline or _is_complete(cached, want)):
        return _require_files(cached, want)
    if offline:
        raise CheckpointError(
            f"model: {model!r} (revision {revision or 'main'}) is neither a directory nor in the hub cache, and "
            f"HF_HUB_OFFLINE forbids downloading it: download it first, or set {MODEL_DIR_VARIABLE} to a local copy"
        )
    return _require_files(_download(model, revision, environ, want), want)


def _cached(model: str, revision: str | None, environ: Mapping[str, str], want: str) -> Path | None:
    """Snapshot in the hub cache, complete or not; never touches the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=_cache_dir(environ),
            allow_patterns=_PATTERNS[want],
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(found)


def _download(model: str, revision: str | None, environ: Mapping[str, str], want: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    name = f"{model!r} (revision {revision or 'main'})"
    try:
        found = snapshot_download(
            model, revision=revision, cache_dir=_cache_dir(environ), allow_patterns=_PATTERNS[want]
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(f"model: {name} is gated: ask for access on the hub and log in ({error})") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"model: found no such revision of {name} on the hub") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise CheckpointError(f"model: {name} is neither a directory nor a repository of the hub") from error
    except Exception as error:  # network, disk and server errors come from several libraries
        raise CheckpointError(
            f"model: {name} cannot be downloaded ({type(error).__name__}: {error}); "
            f"set {MODEL_DIR_VARIABLE} to a local copy to work without the hub"
        ) from error
    return Path(found)


def _is_complete(directory: Path, want: str) -> bool:
    """Whether a cached snapshot has what is wanted, so that the hub need not be asked."""
    if want != CHECKPOINT:
        needed = "tokenizer.json" if want == TOKENIZER else "config.json"
        return (directory / needed).is_file()
    if not all((directory / name).is_file() for name in ("config.json", "tokenizer.json")):
        return False
    try:
        shards = set(json.loads((directory / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError):
        shards = {SINGLE_NAME}
    return all((directory / shard).is_file() for shard in shards)


def _is_offline(environ: Mapping[str, str]) -> bool:
    values = (environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def _cache_dir(environ: Mapping[str, str]) -> str | None:
    """Hub cache named by the environment; None = the library's default."""
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    home = environ.get("HF_HOME")
    return cache or (str(Path(home) / "hub") if home else None)
