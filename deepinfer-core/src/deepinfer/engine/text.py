"""`StopStrings`: the text of a running request, watched for its stop strings.

Only requests with stop strings have one; the text of all others is decoded once, at their end. The commit of a step
feeds it every token. Knows a decoder and strings, not requests or steps.
"""

from __future__ import annotations

from deepinfer.engine.request import TextDecoder


class StopStrings:
    """Decodes token by token and finds stop strings wherever tokens happen to cut them.

    text  everything decoded so far; once a stop string matched, cut before it (after it with `include`)
    """

    __slots__ = ("_decoder", "_include", "_stops", "text")

    def __init__(self, decoder: TextDecoder, stops: tuple[str, ...], include: bool) -> None:
        self._decoder = decoder
        self._stops = stops
        self._include = include
        self.text = ""

    def add(self, token_id: int, armed: bool) -> str | None:
        """Take one token; the stop string that its text completes, or None. Unless `armed` a match does not count."""
        old = len(self.text)
        self.text += self._decoder.push((token_id,))
        return self._match(old) if armed else None

    def close(self) -> str:
        """The final text of a request that ended otherwise, incomplete characters as U+FFFD."""
        self.text += self._decoder.flush()
        return self.text

    def _match(self, old: int) -> str | None:
        """Find the stop string that begins first among those ending behind position `old`, and cut the text there."""
        found: tuple[int, str] | None = None
        for stop in self._stops:
            at = self.text.find(stop, max(0, old - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = at, stop
        if found is None:
            return None
        at, stop = found
        self.text = self.text[: at + len(stop) if self._include else at]
        return stop
