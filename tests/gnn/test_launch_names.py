"""A launcher by its name, with its options behind a colon."""

from __future__ import annotations

import pytest

from culm.errors import UsageError
from culm.gnn.launch import launcher
from culm.gnn.launch.local import LocalLauncher


def test_the_default_is_local_processes() -> None:
    assert isinstance(launcher(), LocalLauncher)
    assert launcher("local").name == "local"


def test_options_stand_behind_the_name() -> None:
    pytest.importorskip("boto3")
    made = launcher("lambda:role=arn:aws:iam::1:role/x,memory_mb=3008,subnets=a+b,security_groups=c")
    function = made.function  # type: ignore[attr-defined]
    assert (function.role, function.memory_mb) == ("arn:aws:iam::1:role/x", 3008)
    assert (function.subnets, function.security_groups) == (("a", "b"), ("c",))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("lamda", "did you mean lambda"),
        ("kubernetes", "there is local, ray, lambda"),
        ("lambda:memory=3", "no option 'memory': did you mean memory_mb"),
        ("lambda:memory_mb=much", "memory_mb=much: give a number"),
        ("local:cpus=2", "no option 'cpus': there is none"),
    ],
)
def test_what_there_is_not_is_refused_with_a_hint(spec: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        launcher(spec)
