"""A view as a page: one HTML file that needs nothing else, or one that a server keeps fresh. Pure, but for its script.

The charting script comes out of plotly's wheel; nothing is ever loaded from elsewhere, and the page says so itself
(Content-Security-Policy).
"""

from __future__ import annotations

import functools
import importlib.util
from html import escape
from pathlib import Path

from culm.errors import UsageError
from culm.observe.view import Block, View

_ASSETS = Path(__file__).with_name("assets")
ALONE = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""What a file may load: nothing but what it has inside."""
SERVED = "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
"""What a page from a server may load: scripts and figures from there."""


def alone(view: View, *, again_s: int | None = None) -> str:
    """One file with everything in it. `again_s`: it is written anew, and browsers look again after so many seconds."""
    again = f'<meta http-equiv="refresh" content="{again_s}">' if again_s else ""
    head = f'<meta http-equiv="Content-Security-Policy" content="{ALONE}">{again}'
    scripts = f"<script>{charting().read_text()}</script>\n<script>{script()}</script>"
    return _framed(view, head, scripts)


def served(view: View) -> str:
    """The page of a server, which asks there for what is new."""
    scripts = '<script src="plotly.min.js"></script><script src="page.js"></script>'
    return _framed(view, "", scripts, f' data-live="1" data-version="{view.version}"')


def _framed(view: View, head: str, scripts: str, body: str = "") -> str:
    data = view.data.decode().replace("<", "\\u003c")  # no text of a run may end the script that it stands in
    sections = "".join(map(_section, view.blocks))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{head}'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(view.title)}</title>'
        f"<style>{_asset('page.css')}</style></head>\n<body{body}><main>{sections}</main>"
        "<noscript><footer>The charts need JavaScript; nothing is loaded from elsewhere.</footer></noscript>\n"
        f'<script type="application/json" id="data">{data}</script>\n{scripts}</body></html>\n'
    )


def _section(block: Block) -> str:
    kind = "wide" if block.wide else ""
    if block.figure is None:
        return f'<section id="{block.id}" class="{kind}">{block.html}</section>'
    note = f"<p class=note>{escape(block.note)}</p>" if block.note else ""
    chart = f'<div class=chart id="chart-{block.id}"></div>'
    return f'<section id="{block.id}" class="{kind}"><h2>{escape(block.title)}</h2>{note}{chart}</section>'


@functools.cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text()


def script() -> str:
    """What draws the charts of a page, and keeps a live one fresh."""
    return _asset("page.js")


@functools.cache
def charting() -> Path:
    """plotly's script, in its wheel; the package itself is not imported. UsageError: it is not installed."""
    found = importlib.util.find_spec("plotly")
    path = Path(found.origin).with_name("package_data") / "plotly.min.js" if found and found.origin else None
    if path is None or not path.is_file():
        raise UsageError("the charts of pages need plotly's script: pip install plotly")
    return path
