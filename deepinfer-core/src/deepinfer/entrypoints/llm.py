"""`LLM`: a model in this process, from prompts to results.

What users call. It turns arguments into requests (`prompts`), runs them (`driver`) and returns results in the order of
the prompts: exactly one a prompt, whatever happens to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from deepinfer.config import EngineConfig
from deepinfer.engine.admission import Ask
from deepinfer.engine.engine import Engine
from deepinfer.engine.output import RequestOutput, ScoreOutput
from deepinfer.engine.request import EngineTokenizer, TokenIds
from deepinfer.engine.stats import EngineStats
from deepinfer.entrypoints.driver import Driver
from deepinfer.entrypoints.progress import Progress
from deepinfer.entrypoints.prompts import Message, Params, asks_of, conversations_of, params_of, refused
from deepinfer.errors import DeepInferError, EngineError
from deepinfer.hub.chat import Renderer, render_chat

logger = logging.getLogger("deepinfer.llm")


class LLM:
    """A loaded model.

    model                   hub id, or directory of a checkpoint
    tokenizer               the same for the tokenizer; None = the model's
    decode_sequence         `generate` and `chat` return plain strings instead of `RequestOutput`s
    engine_args             every other field of `EngineConfig`, and every setting of `deepinfer env` in lower case
    Raises a `DeepInferError` that names what was found and expected.

    May be used from several threads; their requests share the engine's batches. Use it as a context manager, or call
    `close`.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        expert_parallel_size: int = 1,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        decode_sequence: bool = False,
        **engine_args: Any,
    ) -> None:
        from deepinfer.entrypoints.build import build_engine

        config = EngineConfig.create(
            model=model,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            expert_parallel_size=expert_parallel_size,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            decode_sequence=decode_sequence,
            **engine_args,
        )
        self._start(*build_engine(config))

    @classmethod
    def from_engine(cls, engine: Engine, renderer: Renderer = render_chat) -> LLM:
        """An LLM around an engine that was put together by hand, with any executor; `close` closes the engine."""
        llm = cls.__new__(cls)
        llm._start(engine, renderer)
        return llm

    def _start(self, engine: Engine, renderer: Renderer) -> None:
        self.config = engine.config
        self._tokenizer = engine.tokenizer
        self._renderer = renderer
        self._driver = Driver(engine)

    @property
    def stats(self) -> EngineStats:
        """Totals of the engine: steps, tokens, times, drafts."""
        return self._driver.stats

    # --- generating --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        prompt_token_ids: Sequence[TokenIds | None] | None = None,
        use_tqdm: bool = True,
        multi_modal_data: Any = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput] | list[str]:
        """Complete prompts. Returns one result a prompt, in order; a failed one carries `error`.

        prompts           one text or a list; each is encoded with exactly one BOS in front
        sampling_params   one object for all, or one a prompt; mappings of its fields are accepted too
        prompt_token_ids  one list of ids a prompt, used as they are; where given, the text is only kept in the result
        multi_modal_data  one entry a prompt; images are not available in this version (error result)
        priority          one number for all, or one a prompt; requests with a lower one go first
        Raises TypeError or ValueError for a wrong call before anything is queued; EngineError if a step fails (its
        `outputs` then holds one result a prompt).
        """
        asks = asks_of(prompts, sampling_params, prompt_token_ids, multi_modal_data, priority=priority)
        return self._shaped(self._run(asks, use_tqdm))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] = None,
        use_tqdm: bool = True,
        *,
        thinking: bool = False,
        effort: str = "high",
        tools: Sequence[Message] | None = None,
    ) -> list[RequestOutput] | list[str]:
        """Answer one conversation, or several; returns a list with one result each.

        messages  mappings with `role` and `content`, oldest first
        thinking  the answer begins with a chain of thought, `effort` (low, high, xhigh, max) says how long
        tools     function descriptions the model may call
        """
        conversations = conversations_of(messages)
        params = params_of(sampling_params, len(conversations))
        options = {"thinking": thinking, "effort": effort, "tools": tools}
        asks = [self.chat_ask(*pair, options) for pair in zip(conversations, params, strict=True)]
        return self._shaped(self._run(asks, use_tqdm))

    def stream(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        prompt_token_ids: Sequence[TokenIds | None] | None = None,
        multi_modal_data: Any = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields each result as soon as its request ends; `index` names its prompt.

        Requests start with the first result asked for, and those that are left end when the iterator is closed.
        """
        return self.stream_asks(asks_of(prompts, sampling_params, prompt_token_ids, multi_modal_data))

    def score(
        self,
        prompts: str | Sequence[str] | None = None,
        prompt_token_ids: Sequence[TokenIds | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoreOutput]:
        """Log-likelihood of texts under the model; nothing is generated. One result a prompt, in order."""
        outputs = self._run(asks_of(prompts, None, prompt_token_ids, score_only=True), use_tqdm)
        return [
            ScoreOutput(
                request_id=output.request_id,
                token_ids=output.prompt_token_ids or [],
                token_logprobs=output.prompt_logprobs or [],
                error=output.error,
                index=output.index,
            )
            for output in outputs
        ]

    def abort(self, request_ids: str | Iterable[str]) -> list[str]:
        """End requests, from another thread or between two results of `stream`; returns the ids that ended by this."""
        return self._driver.abort(request_ids)

    # --- the rest ----------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> EngineTokenizer:
        """The tokenizer of the engine."""
        assert self._tokenizer is not None, "this engine was made without a tokenizer"
        return self._tokenizer

    def close(self) -> None:
        """End all requests and give the device back. Idempotent."""
        self._driver.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, asks: list[Ask], use_tqdm: bool) -> list[RequestOutput]:
        """All results, in order of the asks."""
        outputs: list[RequestOutput] = []
        with Progress(len(asks), use_tqdm, self._driver.stats) as progress:
            try:
                for output in self._driver.results(self._driver.submit(asks), progress.step):
                    outputs.append(output)
                    progress.finished(output)
            except EngineError as error:
                error.outputs = _in_order([*outputs, *error.outputs])
                raise
        return _in_order(outputs)

    def stream_asks(self, asks: Sequence[Ask]) -> Iterator[RequestOutput]:
        """`stream` for requests that are built already; `chat_ask` and `prompts.asks_of` make them."""
        yield from self._driver.results(self._driver.submit(asks))

    def chat_ask(self, conversation: Sequence[Message], params: Params, options: Mapping[str, Any]) -> Ask:
        """The request of one conversation; a wrong one is that conversation's error only."""
        try:
            return Ask(prompt=self._renderer(conversation, **options), params=params)
        except (DeepInferError, TypeError, ValueError) as error:
            return refused(error)

    def _shaped(self, outputs: list[RequestOutput]) -> list[RequestOutput] | list[str]:
        """The results, or plain strings with `decode_sequence`; these cannot carry errors, so errors are logged."""
        if not self.config.decode_sequence:
            return outputs
        for output in outputs:
            if output.error is not None:
                logger.warning("prompt %d: %s", output.index, output.error)
        return [output.text for output in outputs]


def _in_order(outputs: list[RequestOutput]) -> list[RequestOutput]:
    return sorted(outputs, key=lambda output: output.index)
