"""The documentation as data: code blocks, inline code and links of Markdown files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^>]*?) -->\s*\Z")
_INLINE = re.compile(r"`([^`\n]+)`")
_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)[ ]*")
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block. `not_run` is the reason given in the HTML comment right above the block, or None."""

    language: str
    body: str
    not_run: str | None


def documents() -> list[Path]:
    """README, CONTRIBUTING and all pages of documentation; not the changelog, which names what no longer exists."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
    return pages + sorted((ROOT / "docs").glob("*.md"))


def code_blocks(text: str) -> list[CodeBlock]:
    """The fenced blocks of a page, in order."""
    blocks = []
    for match in _FENCE.finditer(text):
        marker = _NOT_RUN.search(text[: match.start()])
        blocks.append(CodeBlock(match["language"], match["body"], marker["reason"] if marker else None))
    return blocks


def inline_code(text: str) -> list[str]:
    """What stands between backticks outside of fenced blocks; lines of a paragraph are joined."""
    return _INLINE.findall(_LINE_BREAK.sub(" ", _FENCE.sub("", text)))


def links(text: str) -> list[str]:
    """The targets of links and images outside of fenced blocks."""
    return [match["target"] for match in _LINK.finditer(_FENCE.sub("", text))]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of headings."""
    titles = (match["title"] for match in _HEADING.finditer(_FENCE.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
