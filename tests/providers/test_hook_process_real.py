"""Hooks and writers run beside the leader: a slow, raising or dying one does not cost a node."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import textwrap
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_jobs import Nap, job
from typer.testing import CliRunner

import culm
from culm.cli import app
from culm.cluster.run_setup import RunResult
from culm.config import RunConfig
from culm.observe.event_hooks import EventHookReport
from culm.observe.step_metrics import StepMetrics
from culm.providers import hook_process
from culm.providers.fork_server import JobSource
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.testing import reference

pytestmark = [pytest.mark.real, pytest.mark.waits(5), pytest.mark.usefixtures("forked_programs")]
STEPS = 6


def job_file(folder: Path, body: str, fields: str = "on_step=hook") -> JobSource:
    """A job whose hook has this body; `CALLS` is a file in which it can note its calls. `fields`: further fields of
    the job, which name the hook."""
    text = """
    import os, time, culm
    from functools import partial
    from pathlib import Path
    from tests.tiny_jobs import Nap, job as tiny
    CALLS = Path({calls!r})

    def note(about):
        step = about["step"] if isinstance(about, dict) else about.step
        with CALLS.open("a") as file:
            file.write(f"{{step}}\\n")

    def hook(metrics):
        note(metrics)
    {body}

    def job():
        return tiny(layers=[partial(Nap, 0.0)] * 4, steps={steps}, exact=True, {fields})
    """
    path = folder / "hook_job.py"
    filled = textwrap.dedent(text).format(
        calls=str(folder / "calls"), body=textwrap.indent(textwrap.dedent(body), "    "), steps=STEPS, fields=fields
    )
    path.write_text(filled)
    return JobSource(reference=f"{path}:job", path=(str(Path.cwd()),))


def calls(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "calls").read_text().split()]


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def run_to_end(
    fork_server: ForkServerClient,
    folder: Path,
    body: str,
    script: Any = None,
    fields: str = "on_step=hook",
    **options: Any,
) -> RunResult:
    async def main() -> RunResult:
        config = RunConfig(pipelines=2, stages=1, strategy="reroute", out=str(folder / "run"), **options)
        async with local_run(fork_server, job_file(folder, body, fields), config) as run:
            if script is not None:
                await script(run)
            return await run.wait_for_result()

    return asyncio.run(asyncio.wait_for(main(), 120))


def learned(steps: int = STEPS) -> str:
    return reference(job(steps=steps, exact=True, layers=[lambda: Nap(0.0)] * 4)).state_sha256


def test_a_hook_that_blocks_for_longer_than_the_lease_costs_no_node(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    body = """
    if metrics.step == 2:
        time.sleep(4.5)
    return {"twice": 2 * metrics.step}
    """
    result = run_to_end(fork_server, tmp_path, body, suspect_after=1.0)
    assert result.summary is not None, result.message
    assert (result.summary["preemptions"], result.summary["state_sha256"]) == (0, learned())
    assert calls(tmp_path) == list(range(STEPS))
    assert [line["twice"] for line in lines(tmp_path, "steps.jsonl")] == [2.0 * step for step in range(STEPS)]


def test_a_hook_that_hangs_is_reported_and_given_up_and_the_run_goes_on(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    body = """
    if metrics.step == 1:
        time.sleep(3600)
    """
    result = run_to_end(fork_server, tmp_path, body, hook_timeout=1.0)
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == learned()
    (event,) = [event for event in lines(tmp_path, "events.jsonl") if event["kind"] == "hook_failed"]
    assert (event["name"], event["step"]) == ("on_step", 1)
    assert "did not return within 1 s" in event["why"]
    assert calls(tmp_path) == [0, 1]
    assert [line["step"] for line in lines(tmp_path, "steps.jsonl")] == list(range(STEPS))


def test_a_hook_that_ends_its_process_costs_no_node(fork_server: ForkServerClient, tmp_path: Path) -> None:
    body = """
    if metrics.step == 1:
        os._exit(3)
    """
    result = run_to_end(fork_server, tmp_path, body)
    assert result.summary is not None, result.message
    assert (result.summary["preemptions"], result.summary["state_sha256"]) == (0, learned())
    assert "hook_failed" in {event["kind"] for event in lines(tmp_path, "events.jsonl")}


def test_a_hook_that_raises_ends_the_run_after_its_step_is_written(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    result = run_to_end(fork_server, tmp_path, "if metrics.step == 1:\n    raise ValueError('no')")
    assert (result.error, result.message) == ("LayerFailed", "Job.on_step raised ValueError: no")
    assert [line["step"] for line in lines(tmp_path, "steps.jsonl")] == [0, 1]


def test_a_hook_can_stop_the_run(fork_server: ForkServerClient, tmp_path: Path) -> None:
    body = """
    return {"last": 1.0}, culm.STOP if metrics.step == 2 else None
    """
    result = run_to_end(fork_server, tmp_path, body)
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == learned(3)
    assert [line["step"] for line in lines(tmp_path, "steps.jsonl")] == [0, 1, 2]


EVALUATED = "evaluate=tiny().data[:4], evaluate_every=2, on_evaluate=hook, on_step=lambda metrics: {'seen': 1.0}"


def test_a_hook_for_events_that_hangs_delays_no_step_and_costs_no_node(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    """The first call hangs until the run has ended: all steps are done meanwhile, and the other calls follow."""
    body = """
    if metrics["step"] == 1:
        while len((CALLS.parent / "run" / "steps.jsonl").read_text().splitlines()) < 6:
            time.sleep(0.01)
    """
    result = run_to_end(fork_server, tmp_path, body, fields=EVALUATED, suspect_after=1.0)
    assert result.summary is not None, result.message
    assert (result.summary["preemptions"], result.summary["state_sha256"]) == (0, learned())
    assert calls(tmp_path) == [1, 3, 5]
    assert [line["seen"] for line in lines(tmp_path, "steps.jsonl")] == [1.0] * STEPS


def test_a_hook_for_events_that_never_returns_is_reported(fork_server: ForkServerClient, tmp_path: Path) -> None:
    body = """
    if metrics["step"] == 1:
        time.sleep(3600)
    """
    result = run_to_end(fork_server, tmp_path, body, fields=EVALUATED, hook_timeout=1.0)
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == learned()
    failures = [event for event in lines(tmp_path, "events.jsonl") if event["kind"] == "hook_failed"]
    assert failures[0]["name"] == "on_evaluate"
    assert "did not return within 1 s" in failures[0]["why"]


def test_a_hook_for_events_that_raises_is_reported_and_called_again(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    result = run_to_end(fork_server, tmp_path, "raise ValueError('no')", fields=EVALUATED)
    assert result.summary is not None, result.message
    failures = [event for event in lines(tmp_path, "events.jsonl") if event["kind"] == "hook_failed"]
    assert [event["why"] for event in failures] == ["Job.on_evaluate raised ValueError: no"] * 3
    assert calls(tmp_path) == [1, 3, 5]


def test_a_hook_for_events_that_takes_long_is_reported_before_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_process, "SLOW_HOOK_S", 0.01)
    proceed, reports = threading.Event(), list[EventHookReport]()
    described = job(evaluate=job().data[:4], evaluate_every=2, on_evaluate=lambda _: proceed.wait(60))
    agent, theirs = Pipe()
    server = threading.Thread(target=hook_process.HookServer(theirs, described).serve)
    server.start()
    agent.send(("event_hook", hook_process.EventHookOrder({"kind": "evaluation", "step": 1}, None)))
    while (message := agent.recv()) != hook_process.EVENT_HOOK_DONE:
        reports.append(message)
        if len(reports) == 2:
            proceed.set()
    agent.close()
    server.join()
    assert [(report.name, report.why) for report in reports[:2]] == [("on_evaluate", "")] * 2
    assert reports[0].seconds < reports[1].seconds


def test_a_new_leader_does_not_call_the_hook_again(fork_server: ForkServerClient, tmp_path: Path) -> None:
    """The first leader is killed while its hook runs."""
    body = """
    if metrics.step == 2:
        time.sleep(3600)
    return {"own": 1.0}
    """

    async def kill_leader(run: RunHandle) -> None:
        while not (tmp_path / "calls").exists() or calls(tmp_path)[-1] < 2:
            await asyncio.sleep(0.01)
        assert run.leader is not None
        os.kill(fork_server.process_table.agent_pid(run.leader), signal.SIGKILL)

    result = run_to_end(fork_server, tmp_path, body, kill_leader)
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == learned()
    assert calls(tmp_path) == list(range(STEPS))
    written = lines(tmp_path, "steps.jsonl")
    assert [line["step"] for line in written] == list(range(STEPS))
    assert [line.get("own") for line in written] == [1.0, 1.0, None, 1.0, 1.0, 1.0]
    replayed = CliRunner().invoke(app, ["replay", str(tmp_path / "run")])
    assert (replayed.exit_code, "the same instructions" in replayed.output) == (0, True)


def test_values_of_a_hook_in_the_launcher_are_written_and_survive_a_killed_leader(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    """The leader is killed while the hook runs, when the line of the step is not written yet."""
    out, seen = tmp_path / "run", list[int]()

    def hook(metrics: StepMetrics) -> object:
        seen.append(metrics.step)
        if metrics.step == 2:
            (leader,) = [pid for pid in map(fork_server.process_table.agent_pid, (0, 1)) if is_leader(pid, out)]
            os.kill(leader, signal.SIGKILL)
        return {"twice": 2.0 * metrics.step}

    described = job(steps=STEPS, exact=True, on_step=hook, layers=[lambda: Nap(0.0)] * 4)
    summary = culm.train(described, pipelines=2, stages=1, strategy="reroute", out=str(out), fork_server=fork_server)
    assert (summary.state_sha256, summary.preemptions) == (learned(), 1)
    assert seen == list(range(STEPS))
    written = [(line["step"], line["twice"]) for line in lines(tmp_path, "steps.jsonl")]
    assert written == [(step, 2.0 * step) for step in range(STEPS)]


def is_leader(pid: int, out: Path) -> bool:
    """Whether a process has steps.jsonl open, which only the leader has."""
    opened = (link.resolve() for link in Path(f"/proc/{pid}/fd").iterdir())
    return (out / "steps.jsonl").resolve() in opened
