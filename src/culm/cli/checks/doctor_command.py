"""`culm doctor`: check whether this machine can run culm, with an etcd and a small run that loses a node."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.text import Text

from culm.cli.error_reporting import report_errors
from culm.cli.etcd_options import EtcdCa, EtcdCert, EtcdInsecure, EtcdKey, EtcdUser
from culm.cli.progress_display import make_console
from culm.machine_checks.check_result import CheckResult, CheckState
from culm.machine_checks.machine_check import run_checks

Words = str | None
_MARKS: dict[CheckState, tuple[str, str]] = {
    "good": ("ok  ", "green"),
    "weak": ("weak", "yellow"),
    "broken": ("BAD ", "red"),
}


def doctor(
    etcd: Annotated[Words, typer.Option(metavar="URL[,URL...]", help="Check this etcd, too.")] = None,
    etcd_user: EtcdUser = None,
    etcd_ca: EtcdCa = None,
    etcd_cert: EtcdCert = None,
    etcd_key: EtcdKey = None,
    etcd_insecure: EtcdInsecure = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the results as JSON, all else on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Check this machine: libraries, limits, an etcd, and a small run that loses a node."""
    with report_errors(debug=debug):
        from culm.providers.shared_run import etcd_access

        access = None
        if etcd is not None:
            access = etcd_access(etcd, etcd_user, etcd_ca, etcd_cert, etcd_key, insecure=etcd_insecure)
        console = make_console(stderr=json_)
        found = []
        with console.status("running checks"):
            for finding in run_checks(access):
                found.append(finding)
                console.print(_result_line(finding), soft_wrap=True)
        fit = all(finding.state != "broken" for finding in found)
        console.print(
            "this machine can run culm" if fit else "this machine can NOT run culm: fix what is marked BAD above"
        )
        if json_:
            print(json.dumps({"fit": fit, "findings": [finding._asdict() for finding in found]}))
        if not fit:
            raise typer.Exit(1)


def _result_line(finding: CheckResult) -> Text:
    mark, colour = _MARKS[finding.state]
    text = f"{finding.what}: {finding.fix}" if finding.fix else finding.what
    return Text.assemble((mark, colour), f"  {finding.name:<9} {text}")
