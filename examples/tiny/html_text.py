"""Turns an HTML page of a documentation package into plain text with the standard library's parser.

Called by `sources.py`. It knows tags and class names of page furniture (navigation, side bars, anchors), nothing of any
single project. Text inside <pre> stays as it is, everywhere else blanks are collapsed and block tags begin a new line.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

SKIPPED_TAGS = frozenset("script style nav head svg footer template button select option noscript iframe".split())
SKIPPED_CLASSES = frozenset(
    """related sphinxsidebar headerlink navheader navfooter nosearch sidebar mobile-topbar out-of-band since rightside
    srclink anchor search-container sub-logo-container notable-traits nav-wrapper nav-wide-wrapper menu-bar buttons
    toc-backref contents toctree-wrapper footer mobile-nav-chapters""".split()
)
BLOCK_TAGS = frozenset(
    """address article aside blockquote body br center dd details div dl dt fieldset figcaption figure form h1 h2 h3 h4
    h5 h6 header hr li main ol p pre section summary table tbody td th tfoot thead tr ul""".split()
)
PARAGRAPH_TAGS = frozenset("p pre h1 h2 h3 h4 h5 h6 table ul ol dl blockquote section article".split())
CELL_TAGS = frozenset(("td", "th"))


def html_text(page: str) -> str:
    """Readable text of a page. Never raises: what is no HTML comes out as the text it is."""
    parser = _TextParser()
    parser.feed(page)
    parser.close()
    return parser.text()


class _TextParser(HTMLParser):
    """Collects text; while an element is skipped only its own tag is counted, so unclosed inner tags do no harm."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._skipped: str | None = None
        self._depth = 0
        self._pre = 0
        self._cells = 0

    def text(self) -> str:
        joined = re.sub(r"[ \t]*\n[ \t]*(?=\n)", "\n", "".join(self._parts))
        return re.sub(r"\n{3,}", "\n\n", joined).strip("\n")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped is not None:
            self._depth += tag == self._skipped
            return
        if tag in SKIPPED_TAGS or self._is_furniture(attrs):
            if tag not in ("br", "hr", "img", "input", "link", "meta"):
                self._skipped, self._depth = tag, 1
            return
        self._break(tag)
        self._pre += tag == "pre"
        self._cells += tag in CELL_TAGS

    def handle_endtag(self, tag: str) -> None:
        if self._skipped is not None:
            self._depth -= tag == self._skipped
            if self._depth == 0:
                self._skipped = None
            return
        if tag == "pre":
            self._pre = max(0, self._pre - 1)
        if tag in CELL_TAGS:
            self._cells = max(0, self._cells - 1)
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._skipped is not None:
            return
        if not self._pre:
            data = re.sub(r"\s+", " ", data)
            if not self._parts or self._parts[-1].endswith(("\n", " ")):
                data = data.lstrip(" ")
        if data:
            self._parts.append(data)

    def _break(self, tag: str) -> None:
        if tag == "tr":  # rows end cells that were never closed
            self._cells = 0
            self._separate("\n")
        elif tag in CELL_TAGS or (self._cells and tag in BLOCK_TAGS):
            self._separate(" ")
        elif tag in PARAGRAPH_TAGS:
            self._separate("\n\n")
        elif tag in BLOCK_TAGS:
            self._separate("\n")

    def _separate(self, mark: str) -> None:
        """Append a break unless the text already ends with one at least as strong."""
        if self._parts and not self._parts[-1].endswith(("\n\n", mark)) and not (mark == " " and self._at_line_start()):
            self._parts.append(mark)

    def _at_line_start(self) -> bool:
        return self._parts[-1].endswith("\n")

    @staticmethod
    def _is_furniture(attrs: list[tuple[str, str | None]]) -> bool:
        named = " ".join(value or "" for key, value in attrs if key == "class")
        return not SKIPPED_CLASSES.isdisjoint(named.split())
