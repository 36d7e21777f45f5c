"""Finding a model: override, directory, hub cache, download; each failure says what was looked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.errors import CheckpointError
from deepinfer.hub.locate import CONFIG, TOKENIZER, locate

HUB_ID = "owner/model"
CHECKPOINT_FILES = ("config.json", "tokenizer.json", "model.safetensors")


def directory_with(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text("{}", encoding="utf-8")
    return path


def cached(cache: Path, *names: str, revision: str = "main") -> Path:
    """A snapshot in the layout of the hub cache."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "models--owner--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / revision).write_text(commit, encoding="utf-8")
    return directory_with(repository / "snapshots" / commit, *names)


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "cache")}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """`hub(answer)` replaces downloads by `answer(**arguments)`; looking into the cache stays real."""
    import huggingface_hub

    real = huggingface_hub.snapshot_download

    def install(answer: Callable[..., Any]) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def download(repository: str, **arguments: Any) -> str:
            if arguments.get("local_files_only"):
                return real(repository, **arguments)
            calls.append({"repository": repository, **arguments})
            return str(answer(**arguments))

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return calls

    return install


# Directories


def test_directory(tmp_path: Path) -> None:
    directory = directory_with(tmp_path / "model", "config.json")
    assert locate(directory, environ={}) == locate(str(directory), environ={}) == directory


def test_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = directory_with(tmp_path / "model", "config.json")
    assert locate("~/model", environ={}) == directory


def test_directory_without_config(tmp_path: Path) -> None:
    directory = directory_with(tmp_path / "model", "weights.bin")
    with pytest.raises(CheckpointError, match=r"found no config\.json there \(it holds \['weights\.bin'\]\)"):
        locate(directory, environ={})


def test_file_instead_of_directory(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(CheckpointError, match="which is a file, expected a directory or a hub id"):
        locate(path, environ={})


@pytest.mark.parametrize("model", ["/no/such/place", "./model", "a/b/c", "", "owner/", "-x/y", "a b/c"])
def test_neither_directory_nor_hub_id(model: str, offline: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match=r"found no directory .* and it is no hub id"):
        locate(model, environ=offline)


# DEEPINFER_HF_MODEL_DIR


def test_local_copy_stands_for_a_hub_id_and_an_argument_goes_first(tmp_path: Path, offline: dict[str, str]) -> None:
    copy = directory_with(tmp_path / "copy", "config.json")
    other = directory_with(tmp_path / "other", "config.json")
    environ = {**offline, "DEEPINFER_HF_MODEL_DIR": str(copy)}
    assert locate(HUB_ID, environ=environ) == copy
    assert locate(other, environ=environ) == other


def test_local_copy_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"DEEPINFER_HF_MODEL_DIR=.*copy: found no such directory"):
        locate(HUB_ID, environ={"DEEPINFER_HF_MODEL_DIR": str(tmp_path / "copy")})
    directory_with(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"empty: found no config\.json"):
        locate(HUB_ID, environ={"DEEPINFER_HF_MODEL_DIR": str(tmp_path / "empty")})


def test_override_is_of_the_model_not_of_another_tokenizer(tmp_path: Path) -> None:
    environ = {"DEEPINFER_HF_MODEL_DIR": str(directory_with(tmp_path / "copy", "config.json"))}
    tokenizer = directory_with(tmp_path / "tokenizer", "tokenizer.json")
    assert locate(tokenizer, environ=environ, want=TOKENIZER) == tokenizer
    with pytest.raises(CheckpointError, match=r"found no tokenizer\.json"):
        locate(tmp_path / "copy", environ=environ, want=TOKENIZER)


# Hub cache


def test_cached_snapshot(tmp_path: Path, offline: dict[str, str]) -> None:
    snapshot = cached(tmp_path / "cache", *CHECKPOINT_FILES)
    assert locate(HUB_ID, environ=offline) == snapshot
    assert locate(HUB_ID, environ={**offline, "HF_HOME": str(tmp_path / "nothing")}) == snapshot


def test_cache_below_home(tmp_path: Path) -> None:
    snapshot = cached(tmp_path / "hub", *CHECKPOINT_FILES)
    assert locate(HUB_ID, environ={"HF_HUB_OFFLINE": "yes", "HF_HOME": str(tmp_path)}) == snapshot


def test_revision_selects_the_snapshot(tmp_path: Path, offline: dict[str, str]) -> None:
    snapshot = cached(tmp_path / "cache", *CHECKPOINT_FILES, revision="v2")
    assert locate(HUB_ID, revision="v2", environ=offline) == snapshot
    with pytest.raises(CheckpointError, match=r"'owner/model' \(revision main\) is neither"):
        locate(HUB_ID, environ=offline)


def test_offline_and_not_cached(offline: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match="neither a directory nor in the hub cache, and HF_HUB_OFFLINE forbids"):
        locate(HUB_ID, environ=offline)


def test_complete_snapshot_asks_nobody(tmp_path: Path, hub: Callable[..., list[dict[str, Any]]]) -> None:
    snapshot = cached(tmp_path / "cache", *CHECKPOINT_FILES)
    calls = hub(lambda **arguments: pytest.fail("downloaded"))
    assert locate(HUB_ID, environ={"HF_HUB_CACHE": str(tmp_path / "cache")}) == snapshot
    assert calls == []


@pytest.mark.parametrize("missing", CHECKPOINT_FILES)
def test_incomplete_snapshot_is_completed(
    tmp_path: Path, hub: Callable[..., list[dict[str, Any]]], missing: str
) -> None:
    snapshot = cached(tmp_path / "cache", *(name for name in CHECKPOINT_FILES if name != missing))

    def complete(**arguments: Any) -> Path:
        (snapshot / missing).write_text("{}", encoding="utf-8")
        return snapshot

    calls = hub(complete)
    environ = {"HF_HUB_CACHE": str(tmp_path / "cache")}
    assert locate(HUB_ID, environ=environ) == snapshot
    assert len(calls) == 1
    assert locate(HUB_ID, environ=environ) == snapshot
    assert len(calls) == 1


def test_shards_of_the_index_decide_completeness(tmp_path: Path, hub: Callable[..., list[dict[str, Any]]]) -> None:
    snapshot = cached(tmp_path / "cache", "config.json", "tokenizer.json", "a.safetensors")
    index = '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
    (snapshot / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    calls = hub(lambda **arguments: snapshot)
    locate(HUB_ID, environ={"HF_HUB_CACHE": str(tmp_path / "cache")})
    assert len(calls) == 1


# Download


def test_download_takes_only_what_is_wanted(tmp_path: Path, hub: Callable[..., list[dict[str, Any]]]) -> None:
    target = directory_with(tmp_path / "snapshot", "config.json", "tokenizer.json")
    calls = hub(lambda **arguments: target)
    environ = {"HF_HUB_CACHE": str(tmp_path / "cache")}
    assert locate(HUB_ID, revision="abc", environ=environ) == target
    locate(HUB_ID, environ=environ, want=CONFIG)
    locate(HUB_ID, environ=environ, want=TOKENIZER)
    assert calls[0]["revision"] == "abc"
    assert calls[0]["cache_dir"] == str(tmp_path / "cache")
    assert "*.safetensors" in calls[0]["allow_patterns"]
    assert calls[1]["allow_patterns"] == ["config.json"]
    assert not any("safetensors" in pattern for pattern in calls[2]["allow_patterns"])


def failures() -> list[tuple[Exception, str]]:
    from huggingface_hub import errors

    def answered(kind: type[Exception]) -> Exception:
        """The error as after an answer of the server, whose type depends on the library's version."""
        error = kind.__new__(kind)
        Exception.__init__(error, "answer")
        return error

    return [
        (answered(errors.RepositoryNotFoundError), "neither a directory nor a repository of the hub"),
        (answered(errors.GatedRepoError), "is gated"),
        (answered(errors.RevisionNotFoundError), "found no such revision"),
        (errors.LocalEntryNotFoundError("no connection"), "cannot be downloaded .*no connection"),
        (OSError("disk full"), "cannot be downloaded .OSError: disk full"),
    ]


@pytest.mark.parametrize(("error", "reason"), failures(), ids=lambda value: type(value).__name__)
def test_failed_downloads(
    tmp_path: Path, hub: Callable[..., list[dict[str, Any]]], error: Exception, reason: str
) -> None:
    def fail(**arguments: Any) -> Path:
        raise error

    hub(fail)
    with pytest.raises(CheckpointError, match=reason) as caught:
        locate(HUB_ID, environ={"HF_HUB_CACHE": str(tmp_path / "cache")})
    assert HUB_ID in str(caught.value)
