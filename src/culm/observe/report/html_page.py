"""Renders a page layout as HTML: one self-contained file, or a page that a server keeps up to date.

The charting script comes from plotly's wheel. Nothing is loaded from other hosts, which the Content-Security-Policy of
the page enforces.
"""

from __future__ import annotations

import functools
import importlib.util
from html import escape
from pathlib import Path

from culm.errors import UsageError
from culm.observe.report.page_layout import PageBlock, PageLayout

_ASSETS = Path(__file__).with_name("assets")
STANDALONE_CSP = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""A file may load nothing: everything is inline."""
SERVED_CSP = "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
"""A served page may load scripts and data from its server."""


def standalone_page(view: PageLayout, *, refresh_s: int | None = None) -> str:
    """A self-contained page. `refresh_s`: browsers reload it after this many seconds, because it is rewritten."""
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    head = f'<meta http-equiv="Content-Security-Policy" content="{STANDALONE_CSP}">{again}'
    scripts = f"<script>{plotly_script_path().read_text()}</script>\n<script>{page_script()}</script>"
    return _html_document(view, head, scripts)


def live_page(view: PageLayout) -> str:
    """A served page, which polls its server for changes."""
    scripts = '<script src="plotly.min.js"></script><script src="page.js"></script>'
    return _html_document(view, "", scripts, f' data-live="1" data-version="{view.version}"')


def _html_document(view: PageLayout, head: str, scripts: str, body: str = "") -> str:
    data = view.data.decode().replace("<", "\\u003c")  # no text of a run may end the script element
    sections = "".join(map(_section, view.blocks))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{head}'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(view.title)}</title>'
        f"<style>{_asset('page.css')}</style></head>\n<body{body}><main>{sections}</main>"
        "<noscript><footer>The charts need JavaScript; nothing is loaded from elsewhere.</footer></noscript>\n"
        f'<script type="application/json" id="data">{data}</script>\n{scripts}</body></html>\n'
    )


def _section(block: PageBlock) -> str:
    kind = "wide" if block.wide else ""
    if block.figure is None:
        return f'<section id="{block.id}" class="{kind}">{block.html}</section>'
    note = f"<p class=note>{escape(block.note)}</p>" if block.note else ""
    chart = f'<div class=chart id="chart-{block.id}"></div>'
    return f'<section id="{block.id}" class="{kind}"><h2>{escape(block.title)}</h2>{note}{chart}</section>'


@functools.cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text()


def page_script() -> str:
    """The script that draws the charts and updates a live page."""
    return _asset("page.js")


@functools.cache
def plotly_script_path() -> Path:
    """plotly's script in its wheel; the package is not imported. Raises UsageError if it is not installed."""
    found = importlib.util.find_spec("plotly")
    path = Path(found.origin).with_name("package_data") / "plotly.min.js" if found and found.origin else None
    if path is None or not path.is_file():
        raise UsageError("the charts of pages need plotly's script: pip install plotly")
    return path
