"""Renders a conversation as the prompt text the model was trained on.

Called by `LLM.chat`. `render_chat` follows the published rules for turns, thinking and tools. A checkpoint may ship an
encoder of its own in `encoding/`; `chat_renderer` runs that code only when the user trusts it. Knows text only, no ids.

The layout: BOS, then one system turn (system messages, tools, effort) if there is anything to say in it, then
`<｜User｜>` turns, each answered by `<｜Assistant｜>` + `<think>` or `</think>` + text + EOS; the last is left open.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepinfer.errors import RequestError
from deepinfer.hub.byte_tokenizer import ASSISTANT, BOS, DSML, END_THINK, EOS, REMINDER, SYSTEM, THINK, USER

Message = Mapping[str, Any]
Renderer = Callable[..., str]
"""(messages, thinking=False, effort="high", tools=None) -> prompt text"""

EFFORTS: Mapping[str, int] = {"low": 25, "high": 50, "xhigh": 75, "max": 100}
ROLES = ("system", "user", "developer", "latest_reminder", "assistant", "tool")


def render_chat(
    messages: Sequence[Message], thinking: bool = False, effort: str = "high", tools: Sequence[Message] | None = None
) -> str:
    """The prompt for a conversation, beginning with BOS and ending where the assistant is to go on.

    messages   {"role", "content"}; roles system (at the beginning only), user, developer, latest_reminder, assistant
               (optionally "reasoning_content" and "tool_calls"), tool. The last one must not be the assistant's.
    thinking   whether the answer begins with a chain of thought; `effort` (low, high, xhigh, max) says how long
    tools      function descriptions as in {"type": "function", "function": {"name", "description", "parameters"}}

    Reasoning of earlier answers is left out unless there are tools. Raises RequestError naming message and fault.
    """
    checked = [_checked(number, message) for number, message in enumerate(_as_list(messages))]
    if not checked or checked[-1]["role"] in ("assistant", "system"):
        found = checked[-1]["role"] if checked else "no message"
        raise RequestError(f"messages: found {found} at the end, expected a user or tool message to answer")
    if effort not in EFFORTS:
        raise RequestError(f"effort: found {effort!r}, expected one of {', '.join(EFFORTS)}")
    leading = next(number for number, message in enumerate(checked) if message["role"] != "system")
    parts = [BOS, _system_turn(checked[:leading], thinking, effort, tools)]
    for number in range(leading, len(checked)):
        parts.append(_turn(checked, number, keep_reasoning=bool(tools)))
    parts.append(ASSISTANT + (THINK if thinking else END_THINK))
    return "".join(parts)


def _system_turn(messages: Sequence[Message], thinking: bool, effort: str, tools: Sequence[Message] | None) -> str:
    texts = [message["content"] for message in messages]
    if tools:
        texts.append(_tools_text(tools))
    if thinking:
        texts.append(f"Reasoning Effort: {EFFORTS[effort]} (range 1-100, higher values ask for longer reasoning)")
    return SYSTEM + "\n\n".join(texts) if texts else ""


def _turn(messages: Sequence[Message], number: int, keep_reasoning: bool) -> str:
    message = messages[number]
    role, content = message["role"], message["content"]
    previous = messages[number - 1]["role"] if number else None
    if role == "system":
        raise RequestError(f"messages[{number}]: found a system message, expected it before all other messages")
    if role == "latest_reminder":
        return REMINDER + content
    if role == "tool":
        result = f"<tool_result>{content}</tool_result>"
        return result if previous == "tool" else USER + result
    if role != "assistant":
        return USER + content
    reasoning = message.get("reasoning_content")
    opening = f"{THINK}{reasoning}{END_THINK}" if keep_reasoning and reasoning else END_THINK
    return ASSISTANT + opening + content + _calls_text(number, message.get("tool_calls") or ()) + EOS


def _calls_text(number: int, calls: Sequence[Message]) -> str:
    """Tool calls of an answer as a DSML block."""
    if not calls:
        return ""
    blocks = []
    for call in calls:
        name, arguments = _call(number, call)
        lines = [f'<{DSML}invoke name="{name}">']
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            text = value if is_text else json.dumps(value, ensure_ascii=False)
            lines.append(f'<{DSML}parameter name="{key}" string="{str(is_text).lower()}">{text}</{DSML}parameter>')
        blocks.append("\n".join([*lines, f"</{DSML}invoke>"]))
    return "\n\n" + "\n".join([f"<{DSML}tool_calls>", *blocks, f"</{DSML}tool_calls>"])


def _call(number: int, call: Message) -> tuple[str, Mapping[str, Any]]:
    """Name and arguments of a call; arguments may be an object or, as in other APIs, its JSON text."""
    try:
        function = call.get("function", call)
        name, arguments = function["name"], function.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (AttributeError, KeyError, TypeError, ValueError):
        arguments, name = None, None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        expected = "a name and an object of arguments"
        raise RequestError(f"messages[{number}]: found tool call {call!r:.120}, expected {expected}")
    return name, arguments


def _tools_text(tools: Sequence[Message]) -> str:
    try:
        schemas = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    except (AttributeError, TypeError, ValueError):
        raise RequestError(f"tools: found {tools!r:.120}, expected a list of function descriptions") from None
    lines = [
        "## Tools",
        "Functions you can call, one JSON description a line:",
        *schemas,
        "Call them with a block of this form (string is true for text, false for any other JSON value):",
        f"<{DSML}tool_calls>",
        f'<{DSML}invoke name="NAME">',
        f'<{DSML}parameter name="NAME" string="true|false">VALUE</{DSML}parameter>',
        f"</{DSML}invoke>",
        f"</{DSML}tool_calls>",
    ]
    return "\n".join(lines)


def _as_list(messages: Any) -> Sequence[Message]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages: found {type(messages).__name__}, expected a list of messages")
    return messages


def _checked(number: int, message: Any) -> dict[str, Any]:
    """The message with its content as one text."""
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise RequestError(f'{where}: found {type(message).__name__}, expected an object with "role" and "content"')
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}: found role {role!r}, expected one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "".join(_text_part(where, part) for part in content)
    if not isinstance(content, str):
        raise RequestError(f"{where}: found content of type {type(content).__name__}, expected text")
    return {**message, "content": content}


def _text_part(where: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    found = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(f'{where}: found a content part of type {found!r}, expected parts of type "text"')
