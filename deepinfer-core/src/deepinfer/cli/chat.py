"""`deepinfer chat`: a conversation in the terminal, or one message and its answer."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, cast

from deepinfer.cli.arguments import add_engine_arguments, add_sampling_arguments, engine_arguments, sampling_arguments

if TYPE_CHECKING:
    from deepinfer import LLM, RequestOutput, SamplingParams

USAGE = "deepinfer chat [FLAGS] [MESSAGE]"
HELP = "Talks to the model in the release's own prompt format. Without a message it keeps asking for the next one."
EXAMPLES = """\
examples:
  deepinfer chat --model /tmp/tiny
  deepinfer chat --thinking --effort low "How many r are in strawberry?"
  echo "Hello" | deepinfer chat

in a conversation: /reset forgets it, /exit (or the end of input) leaves
"""

_END_THINK = "</think>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `deepinfer chat`."""
    add = parser.add_argument
    add("message", nargs="?", metavar="MESSAGE", help="one message to answer; without it, a conversation")
    add("--system", metavar="TEXT", help="instructions that come before the conversation")
    add(
        "--thinking", action=argparse.BooleanOptionalAction, default=False, help="let the model think before it answers"
    )
    add("--effort", choices=("low", "high", "xhigh", "max"), default="high", help="how long to think (default: high)")
    add_sampling_arguments(parser, max_tokens=1024)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answers one message or holds a conversation; 1 if the last answer failed."""
    from deepinfer import LLM, SamplingParams

    params = SamplingParams(**sampling_arguments(args))
    options = {"thinking": args.thinking, "effort": args.effort}
    with LLM(**engine_arguments(args)) as llm:
        conversation = Conversation(llm, params, args.system, options)
        if args.message is not None:
            return 0 if conversation.say(args.message) else 1
        return _converse(conversation)


class Conversation:
    """The messages so far and the model that answers them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, options: dict[str, Any]) -> None:
        self._llm, self._params, self._options = llm, params, options
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._opening)

    def reset(self) -> None:
        """Forgets everything but the instructions."""
        self.messages = list(self._opening)

    def say(self, text: str) -> bool:
        """Prints the model's answer to `text`. If it fails, the message is taken back and False returned."""
        self.messages.append({"role": "user", "content": text})
        results = self._llm.chat(self.messages, self._params, use_tqdm=False, **self._options)
        result = cast("list[RequestOutput]", results)[0]
        if result.error is not None:
            self.messages.pop()
            print(f"deepinfer: {result.error}", file=sys.stderr)
            return False
        answer = self._without_end(result)
        print(answer, flush=True)
        reasoning, found, content = answer.rpartition(_END_THINK)
        message = {"role": "assistant", "content": content}
        if found:
            message["reasoning_content"] = reasoning
        self.messages.append(message)
        return True

    def _without_end(self, result: RequestOutput) -> str:
        """The text less the end token, which the prompt format adds itself when the conversation goes on."""
        if result.finish_reason != "stop" or result.stop_reason is not None or not result.token_ids:
            return result.text
        return result.text.removesuffix(self._llm.get_tokenizer().decode(result.token_ids[-1:]))


def _converse(conversation: Conversation) -> int:
    interactive = sys.stdin.isatty()
    answered = True
    while (line := _next_line(interactive)) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            conversation.reset()
        elif line:
            answered = conversation.say(line)
    return 0 if answered else 1


def _next_line(interactive: bool) -> str | None:
    """The next message, None at the end of input."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
