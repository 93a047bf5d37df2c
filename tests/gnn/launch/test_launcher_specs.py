"""Launchers by name, with options after a colon."""

from __future__ import annotations

import pytest

from culm.errors import UsageError
from culm.gnn.launch import make_launcher
from culm.gnn.launch.local_launcher import LocalLauncher


def test_the_default_is_local_processes() -> None:
    assert isinstance(make_launcher(), LocalLauncher)
    assert make_launcher("local").name == "local"


def test_options_follow_the_name() -> None:
    pytest.importorskip("boto3")
    launcher = make_launcher("lambda:role=arn:aws:iam::1:role/x,memory_mb=3008,subnets=a+b,security_groups=c")
    function = launcher.function  # type: ignore[attr-defined]
    assert (function.role, function.memory_mb) == ("arn:aws:iam::1:role/x", 3008)
    assert (function.subnets, function.security_groups) == (("a", "b"), ("c",))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("lamda", "did you mean lambda"),
        ("kubernetes", "use local, ray, lambda"),
        ("lambda:memory=3", "no option 'memory': did you mean memory_mb"),
        ("lambda:memory_mb=much", "memory_mb=much: give a number"),
        ("local:cpus=2", "no option 'cpus': there are none"),
    ],
)
def test_unknown_names_and_options_are_rejected_with_a_hint(spec: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make_launcher(spec)
