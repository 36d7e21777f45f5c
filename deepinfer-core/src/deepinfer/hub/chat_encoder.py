"""The chat encoder that a checkpoint may ship in `encoding/`: Python code of the checkpoint, run only when trusted.

`chat_renderer` gives `LLM.chat` the function that renders conversations: the checkpoint's own with
`trust_remote_code=True`, else `chat.render_chat`. The contract with the shipped file is small:

    encoding/encoding_dsv41.py defines
        encode_messages(messages, thinking_mode, ...) -> str
    messages        list of {"role", "content", ...}; tools, if any, lie under "tools" of the first (system) message
    thinking_mode   "thinking" or "chat"
    reasoning_effort=...   is passed where the function takes it
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from deepinfer.errors import CheckpointError, RequestError
from deepinfer.hub.chat import Message, Renderer, render_chat

ENCODER_FILE = Path("encoding") / "encoding_dsv41.py"
_MODULE_NAME = "deepinfer_checkpoint_encoder"


def chat_renderer(directory: Path | None, trust_remote_code: bool = False) -> Renderer:
    """The function that renders conversations for the checkpoint in `directory`.

    Raises CheckpointError where the checkpoint's encoder is trusted but cannot be loaded.
    """
    path = None if directory is None else directory / ENCODER_FILE
    if path is None or not trust_remote_code or not path.is_file():
        return render_chat
    encode = getattr(_load(path), "encode_messages", None)
    if not callable(encode):
        raise CheckpointError(f"{path}: found no function encode_messages(messages, thinking_mode, ...)")
    takes_effort = _takes(encode, "reasoning_effort")

    def render(
        messages: Sequence[Message],
        thinking: bool = False,
        effort: str = "high",
        tools: Sequence[Message] | None = None,
    ) -> str:
        options: dict[str, Any] = {"thinking_mode": "thinking" if thinking else "chat"}
        if thinking and takes_effort:
            options["reasoning_effort"] = effort
        try:
            return encode(_with_tools(messages, tools), **options)
        except Exception as error:  # the checkpoint's code may raise anything about a request it does not like
            raise RequestError(f"messages: refused by {path}: {type(error).__name__}: {error}") from error

    return render


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise CheckpointError(f"{path}: is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_NAME] = module  # dataclasses look their module up while it is executed
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[_MODULE_NAME]
        raise CheckpointError(f"{path}: cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _takes(function: Any, keyword: str) -> bool:
    parameters = inspect.signature(function).parameters
    return keyword in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _with_tools(messages: Sequence[Message], tools: Sequence[Message] | None) -> list[Message]:
    if not tools:
        return list(messages)
    first = dict(messages[0]) if messages and messages[0].get("role") == "system" else {"role": "system", "content": ""}
    rest = messages[1:] if messages and messages[0].get("role") == "system" else messages
    return [{**first, "tools": list(tools)}, *rest]
