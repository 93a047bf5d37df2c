"""`culm plan`: a table and a grid for people, one object for scripts, one sentence for mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_process import one_sentence

from culm.cli import main
from culm.plan import LayerCost, Profile
from culm.schedule import Action, Plan, check_plan

SHAPE = ("--pipelines", "3", "--stages", "4", "--micro-batches", "18")


def stdout_of(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["plan", *SHAPE, *options])
    assert end.value.code == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    found = json.loads(stdout_of(capsys, "--json", *options))
    assert isinstance(found, dict)
    return found


def test_the_table_and_the_grid_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = stdout_of(capsys, "--fail", "2.2")
    rows = {line[:18].strip(): line[18:].strip() for line in found.splitlines()}
    assert rows["slots"] == "27 a step when steps follow each other, 29 for one alone"
    assert rows["bound"] == "27"
    assert rows["gap"] == "0.0%"
    assert rows["no failure"] == "19 planned the same way, 27 with 1F1B"
    assert rows["slowdown"].startswith("1.42x")
    assert rows["peak activations"] == "9"
    assert "reroute: 3 pipelines x 4 stages, 18 micro-batches" in found
    assert "why 1" not in rows


def test_explain_adds_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    found = stdout_of(capsys, "--fail", "2.2", "--explain")
    assert "stage 2 runs on 2 of 3 workers" in found
    assert "no plan is shorter" in found


@pytest.mark.parametrize(
    ("options", "slots", "bound"),
    [
        (["--no-split", "--no-stagger"], 27, 27),
        (["--fail", "2.2", "--no-split", "--no-stagger"], 33, 33),
        (["--fail", "2.2", "--no-stagger"], 29, 29),
        (["--fail", "2.2"], 27, 27),
        (["--fail", "2.2", "--memory", "1f1b"], 32, 31),
        (["--fail", "2.2", "--memory", "4"], 29, 28),
        (["--fail", "1.2", "--fail", "2.2"], 54, 54),
        (["--fail", "2.2", "--times", "F=2,I=2,W=2"], 54, 54),
    ],
)
def test_options_change_the_answer(
    capsys: pytest.CaptureFixture[str], options: list[str], slots: int, bound: int
) -> None:
    found = as_json(capsys, *options)
    assert (found["slots"], found["bound"]) == (slots, bound)
    assert found["gap"] == pytest.approx(slots / bound - 1)
    assert found["solver"] == "greedy"


def test_the_schedule_in_the_json_is_one_that_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--fail", "2.2", "--fail", "0.1", "--memory", "4")
    rows = {label: tuple(map(Action.parse, row)) for label, row in found["schedule"].items()}
    assert list(rows)[:5] == ["0.0", "0.1", "0.2", "0.3", "1.0"]
    assert rows["2.2"] == rows["0.1"] == ()
    assert found["failed"] == ["0.1", "2.2"]
    plan = Plan("read", 3, 4, 4, 18, tuple(rows.values()), failed=(1, 10))
    assert check_plan(plan, max_activations=4).max_peak_activations == found["peak_activations"] == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--fail", "5.0"], "the failed slot 5.0 does not exist: use 0.0 to 2.3"),
        (["--fail", "2,2"], "--fail '2,2' is not a slot: write pipeline.stage"),
        (["--fail", "0.1", "--fail", "1.1", "--fail", "2.1"], "stage 1 has lost all of its 3 workers"),
        (["--times", "F=-1"], "Costs.forward is -1.0: use a number of at least 0"),
        (["--times", "Q=1"], "--times has 'Q=1'"),
        (["--memory", "lots"], "--memory 'lots' is not a number of activations: use none, 1f1b, or a number"),
        (["--memory", "0"], "memory is 0"),
        (["--solver", "magic"], "there is no --solver 'magic': use greedy or cp-sat"),
        (["--solver", "cp-sat", "--limit", "0"], "the time limit is 0.0 s: use a number above 0"),
        (["--micro-batches", "2"], "micro_batches is 2, fewer than the 3 pipelines"),
        (["--stages", "0"], "stages is 0: use a whole number of at least 1"),
    ],
)
def test_a_wrong_request_ends_with_one_sentence(
    capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *SHAPE, *options])
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert shown.out == ""
    assert sentence in one_sentence(shown.err)


def test_it_needs_neither_torch_nor_numpy() -> None:
    script = (
        "import sys; from culm.cli import main\n"
        "try: main()\n"
        "except SystemExit: sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, "plan", *SHAPE, "--fail", "2.2"], capture_output=True, timeout=30, check=False
    )
    assert ended.returncode == 0
    assert b"27 a step" in ended.stdout


def invoke(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["plan", *options])
    found = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, found.out, found.err


BERT = ("--model", "bert-large", "--instance", "p3.2xlarge")
WIDE = ("--model", "gpt-3-175b", "--instance", "g4dn.xlarge")


def test_a_table_of_choices_is_within_the_budget_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, *BERT, "--nodes", "4..16", "--budget", "5/h", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["choices"]
    assert all(4 <= row["nodes"] <= 16 and row["usd_per_h"] <= 5 for row in found["choices"])
    goodput = [row["goodput"] for row in found["choices"]]
    assert goodput[1:] == sorted(goodput[1:], reverse=True)
    assert goodput[0] >= 0.98 * max(goodput)
    assert {"slots", "bound", "gap", "peak_activations", "solver", "schedule"} <= set(found)


def test_the_table_has_the_reason_and_the_date_of_the_prices(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, *BERT, "--nodes", "8", "--on", "2022-06-30")
    assert code == 0
    assert "samples/s for 7.34 $/h" in out
    assert "0.918 $/h spot" in out
    assert "2022-01-01" in out


def test_a_shape_of_a_model_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, *BERT, "--pipelines", "2", "--stages", "4", "--micro-batches", "16", "--explain")
    assert code == 0
    assert "32 samples in 16 micro-batches of 2" in out
    for told in ("gap to the bound", "failures, spread as well as can be", "re-route, split, stagger", "0.3  "):
        assert told in out


def test_a_shape_of_a_model_as_json_has_the_keys_of_every_plan(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = invoke(capsys, *BERT, "--pipelines", "2", "--stages", "2", "--micro-batches", "8", "--json")
    found = json.loads(out)
    assert found["pipelines"] == found["stages"] == 2
    assert list(found["slowdowns"]) == ["1", "2"]
    assert found["choice"]["usd_per_h"] > 0
    assert found["step_s"] == found["choice"]["step_s"]
    assert (found["nodes"], found["workers"], found["cost_per_h"]) == (4, 4, found["choice"]["usd_per_h"])


def test_a_profile_is_planned_and_the_best_choice_written_for_the_simulator(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    block = LayerCost(
        name="block",
        forward_s=0.01,
        input_s=0.01,
        weight_s=0.01,
        parameter_bytes=10**8,
        state_bytes=3 * 10**8,
        activation_bytes=10**7,
        output_bytes=10**6,
    )
    profile, plan = tmp_path / "p.json", tmp_path / "plan.toml"
    Profile(layers=(block,) * 8, device="cpu", micro_batch=4, threads=1, source="measured").save(profile)
    options = ("--instance", "g5.xlarge", "--nodes", "4..8", "--budget", "40/h", "--out", str(plan))
    code, out, _ = invoke(capsys, "--profile", str(profile), *options)
    assert code == 0
    assert "32 micro-batches a step are assumed" in out
    found = tomllib.loads(plan.read_text())
    assert found["instance"] == "g5.xlarge"
    assert len(found["times"]["forward"]) == found["stages"]
    assert found["pipelines"] * found["stages"] <= 8


def test_the_timeline_and_the_plan_are_written_to_the_given_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture, text = tmp_path / "plan.svg", tmp_path / "plan.txt"
    stdout_of(capsys, "--fail", "2.2", "--svg", str(picture), "--out", str(text))
    assert picture.read_text().startswith("<svg")
    assert check_plan(Plan.from_text(text.read_text())).max_peak_activations == 9


def test_every_way_to_go_on_is_in_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--fail", "2.2", "--explain")
    assert {"re-route", "shadow", "fewer pipelines", "uneven pipelines"} <= {way["name"] for way in found["remedies"]}


def test_the_solver_proves_what_the_rules_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ortools")
    found = as_json(capsys, "--fail", "2.2", "--no-stagger", "--solver", "cp-sat")
    assert (found["slots"], found["bound"], found["solver"]) == (29, 29, "cp-sat")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "bert-larg", "--instance", "p3.2xlarge"], "did you mean bert-large?"),
        (["--model", "bert-large", "--instance", "p3.2xlrge"], "did you mean p3.2xlarge?"),
        (["--model", "bert-large", "--instance", "c5n.2xlarge"], "has no accelerator to train on"),
        ([*BERT, "--nodes", "16..64", "--budget", "1/h"], "use --budget 7/h"),
        ([*BERT, "--nodes", "64..16"], "nodes is 64..16"),
        ([*BERT, "--nodes", "many"], "--nodes 'many' is not a number of nodes"),
        ([*BERT, "--budget", "much"], "--budget 'much' is not a price"),
        ([*BERT, "--pipelines", "4", "--stages", "60"], "use --stages 26"),
        ([*BERT, "--pipelines", "4", "--stages", "8", "--nodes", "16"], "use --nodes 32"),
        ([*BERT, "--micro-batch", "3"], "cannot be cut into micro-batches of 3: use a divisor of 256"),
        ([*BERT, "--precision", "int8"], "precision is 'int8'"),
        ([*BERT, "--preemption-rate", "-1"], "Risk.preemption_rate is -1.0"),
        ([*BERT, "--profile", "p.json"], "--model and --profile both say what is trained"),
        ([*WIDE, "--pipelines", "1", "--stages", "96"], "use a device with more, as A100"),
        (["--profile", "/nowhere/p.json"], "the profile '/nowhere/p.json' could not be read"),
        (["--pipelines", "3"], "--stages is missing"),
    ],
)
def test_an_impossible_request_ends_with_one_sentence_and_the_nearest_choice(
    capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    code, out, err = invoke(capsys, *options)
    assert (code, out) == (2, "")
    assert sentence in one_sentence(err)


def test_bf16_is_the_default_where_the_accelerator_has_it_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--pipelines", "1", "--stages", "2", "--micro-batches", "4", "--json")
    notes = {}
    for instance in ("p5.48xlarge", "p3.2xlarge"):
        _, out, _ = invoke(capsys, "--model", "bert-large", "--instance", instance, *shape)
        notes[instance] = " ".join(json.loads(out)["notes"])
    assert "estimated for H100 in bf16 (the default for it" in notes["p5.48xlarge"]
    assert "estimated for V100 in fp32 (the default for it" in notes["p3.2xlarge"]


def test_a_doubtful_price_is_a_warning_on_stderr_and_in_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "bert-large", "--instance", "Standard_NC40ads_H100_v5", "--nodes", "4", "--json")
    code, out, err = invoke(capsys, *options)
    assert code == 0
    old, equal = err.splitlines()
    assert old.startswith("culm: warning: the price of Standard_NC40ads_H100_v5 is ")
    assert "equals its on-demand price" in equal
    assert sum(note.startswith("warning: ") for note in json.loads(out)["notes"]) == 2
    assert len(invoke(capsys, *options, "--on-demand")[2].splitlines()) == 1


def test_a_config_json_is_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--instance", "p5.48xlarge", "--pipelines", "2", "--stages", "2", "--micro-batches", "8", "--json")
    code, out, _ = invoke(capsys, "--model", str(tmp_path / "config.json"), *options)
    assert code == 0
    assert "494M parameters" in " ".join(json.loads(out)["notes"])


def test_an_instance_without_a_known_price_is_not_planned(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = invoke(capsys, "--model", "bert-large", "--instance", "a3-megagpu-8g", "--nodes", "1")
    assert code == 2
    assert "the spot price of a3-megagpu-8g+8xH100 is not known: give it with --prices CSV" in one_sentence(err)
