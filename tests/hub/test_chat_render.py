"""Conversations become prompts as published; wrong messages are named; a checkpoint's code runs only when trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer.errors import CheckpointError, RequestError
from deepinfer.hub.chat import render_chat
from deepinfer.hub.chat_encoder import chat_renderer
from deepinfer.hub.tokenizer import Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
Messages = list[dict[str, Any]]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def test_single_question() -> None:
    assert render_chat([user("Hi")]) == f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"


@pytest.mark.parametrize(("effort", "number"), [("low", 25), ("high", 50), ("xhigh", 75), ("max", 100)])
def test_thinking_adds_the_effort_and_opens_the_thought(effort: str, number: int) -> None:
    prompt = render_chat([user("Hi")], thinking=True, effort=effort)
    assert prompt.startswith(f"{BOS}<｜System｜>Reasoning Effort: {number} (range 1-100")
    assert prompt.endswith("<｜User｜>Hi<｜Assistant｜><think>")


def test_default_effort_is_high() -> None:
    assert render_chat([user("Hi")], thinking=True) == render_chat([user("Hi")], thinking=True, effort="high")


def test_history() -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("1"), assistant("one"), user("2")]
    expected = f"{BOS}<｜System｜>Be brief.<｜User｜>1<｜Assistant｜></think>one{EOS}<｜User｜>2<｜Assistant｜></think>"
    assert render_chat(messages) == expected


def test_several_system_messages_make_one_turn() -> None:
    messages = [{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, user("?")]
    assert render_chat(messages).startswith(f"{BOS}<｜System｜>A\n\nB<｜User｜>?")


def test_developer_and_reminder() -> None:
    messages = [{"role": "developer", "content": "D"}, {"role": "latest_reminder", "content": "R"}, user("Q")]
    assert render_chat(messages) == f"{BOS}<｜User｜>D<｜latest_reminder｜>R<｜User｜>Q<｜Assistant｜></think>"


def test_old_reasoning_is_dropped_unless_there_are_tools() -> None:
    messages = [user("1"), assistant("one", reasoning_content="hmm"), user("2")]
    assert "hmm" not in render_chat(messages, thinking=True)
    assert "<｜Assistant｜><think>hmm</think>one" in render_chat(messages, thinking=True, tools=TOOLS)


def test_tools_are_described_in_the_system_turn() -> None:
    prompt = render_chat([{"role": "system", "content": "S"}, user("?")], tools=TOOLS)
    system = prompt.split("<｜User｜>")[0]
    assert system.startswith(f"{BOS}<｜System｜>S\n\n")
    assert '{"name": "add", "parameters": {"type": "object"}}' in system
    assert "<｜DSML｜tool_calls>" in system


@pytest.mark.parametrize("arguments", [{"a": "x", "n": 3, "l": [1, "é"]}, '{"a": "x", "n": 3, "l": [1, "é"]}'])
def test_tool_calls_and_results(arguments: Any) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    results = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    prompt = render_chat([user("?"), assistant(None, tool_calls=calls), *results], tools=TOOLS)
    call = (
        "<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="l" string="false">[1, "é"]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        "</｜DSML｜tool_calls>"
    )
    assert f"<｜Assistant｜></think>\n\n{call}{EOS}" in prompt
    results_turn = "<｜User｜><tool_result>4</tool_result><tool_result>5</tool_result>"
    assert prompt.endswith(f"{results_turn}<｜Assistant｜></think>")


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]
    assert render_chat([user(parts)]) == render_chat([user("Hello you")])


def test_rendered_prompt_gets_no_second_bos() -> None:
    ids = Tokenizer.byte_level(512).encode(render_chat([user("Hi")]))
    assert ids.count(0) == 1
    assert ids[:2] == [0, 496]
    assert ids[-2:] == [497, 502]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "found no message at the end"),
        ("Hi", "messages: found str"),
        (user("Hi"), "messages: found dict"),
        (None, "messages: found NoneType"),
        (["Hi"], r"messages\[0\]: found str"),
        ([{"content": "Hi"}], r"messages\[0\]: found role None"),
        ([{"role": "User", "content": "Hi"}], r"messages\[0\]: found role 'User', expected one of system, user"),
        ([user("a"), user(None)], r"messages\[1\]: found content of type NoneType"),
        ([user(3)], r"messages\[0\]: found content of type int"),
        ([user(b"x")], r"messages\[0\]: found content of type bytes"),
        ([user([{"type": "image_url", "image_url": {}}])], r"content part of type 'image_url'"),
        ([user(["x"])], r"content part of type 'str'"),
        ([user("a"), assistant("b")], "found assistant at the end"),
        ([{"role": "system", "content": "a"}], "found system at the end"),
        ([user("a"), {"role": "system", "content": "b"}, user("c")], r"messages\[1\]: found a system message"),
        ([user("a"), assistant(None), user("b")], r"messages\[1\]: found content of type NoneType"),
        ([user("a"), assistant("", tool_calls=[{"name": 3}]), user("b")], r"messages\[1\]: found tool call"),
        ([user("a"), assistant("", tool_calls=["f"]), user("b")], r"messages\[1\]: found tool call"),
        ([user("a"), assistant("", tool_calls=[{"name": "f", "arguments": "{"}]), user("b")], "found tool call"),
        ([user("a"), assistant("", tool_calls=[{"name": "f", "arguments": "[]"}]), user("b")], "found tool call"),
    ],
)
def test_wrong_messages_are_named(messages: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        render_chat(messages)


def test_wrong_effort_and_tools() -> None:
    with pytest.raises(RequestError, match="effort: found 'medium', expected one of low, high, xhigh, max"):
        render_chat([user("a")], effort="medium")
    with pytest.raises(RequestError, match="tools: found"):
        render_chat([user("a")], tools=["f"])  # type: ignore[list-item]


# The checkpoint's own encoder

ENCODER = """
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path

Path(__file__).with_name("ran").touch()

@dataclass
class Turn:
    role: str

def encode_messages(messages, thinking_mode, reasoning_effort=None):
    if messages[-1]["role"] == "assistant":
        raise ValueError("nothing to answer")
    return f"{thinking_mode}/{reasoning_effort}/" + "|".join(
        f"{Turn(m['role']).role}:{m['content']}{':' + str(len(m['tools'])) if 'tools' in m else ''}" for m in messages
    )
"""


def ship(directory: Path, code: str) -> Path:
    (directory / "encoding").mkdir()
    (directory / "encoding" / "encoding_dsv41.py").write_text(code, encoding="utf-8")
    return directory / "encoding" / "ran"


def test_shipped_encoder_runs_only_when_trusted(tmp_path: Path) -> None:
    ran = ship(tmp_path, ENCODER)
    assert chat_renderer(tmp_path) is render_chat
    assert not ran.exists()
    render = chat_renderer(tmp_path, trust_remote_code=True)
    assert render([user("Hi")]) == "chat/None/user:Hi"
    assert ran.exists()


def test_shipped_encoder_gets_mode_effort_and_tools(tmp_path: Path) -> None:
    ship(tmp_path, ENCODER)
    render = chat_renderer(tmp_path, trust_remote_code=True)
    assert render([user("Hi")], thinking=True, effort="max") == "thinking/max/user:Hi"
    assert render([user("Hi")], tools=TOOLS) == "chat/None/system::1|user:Hi"
    messages = [{"role": "system", "content": "S"}, user("Hi")]
    assert render(messages, tools=TOOLS) == "chat/None/system:S:1|user:Hi"
    assert messages[0] == {"role": "system", "content": "S"}


def test_effort_is_left_out_where_the_encoder_takes_none(tmp_path: Path) -> None:
    ship(tmp_path, "def encode_messages(messages, thinking_mode):\n    return thinking_mode\n")
    render = chat_renderer(tmp_path, trust_remote_code=True)
    assert render([user("Hi")], thinking=True, effort="max") == "thinking"


def test_what_the_shipped_encoder_refuses_is_a_request_error(tmp_path: Path) -> None:
    ship(tmp_path, ENCODER)
    with pytest.raises(RequestError, match=r"encoding_dsv41\.py: ValueError: nothing to answer"):
        chat_renderer(tmp_path, trust_remote_code=True)([assistant("x")])


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nothing_of_this_name", "cannot be loaded: ModuleNotFoundError"),
        ("x = 1", "found no function encode_messages"),
    ],
)
def test_broken_encoder_is_an_error_when_trusted(tmp_path: Path, code: str, reason: str) -> None:
    ship(tmp_path, code)
    assert chat_renderer(tmp_path) is render_chat
    with pytest.raises(CheckpointError, match=reason):
        chat_renderer(tmp_path, trust_remote_code=True)


def test_without_shipped_encoder(tmp_path: Path) -> None:
    assert chat_renderer(tmp_path, trust_remote_code=True) is render_chat
    assert chat_renderer(None, trust_remote_code=True) is render_chat
