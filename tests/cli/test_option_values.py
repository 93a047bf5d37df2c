"""Options that are more than a number or a name."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from culm.cli import option_values
from culm.errors import UsageError
from culm.providers.advertised_address import check_free_ports
from culm.schedule import Costs


@pytest.mark.parametrize(
    ("text", "found"), [("100", 100), ("2kB", 2000), ("1.5 GiB", 3 << 29), ("16G", 16 * 10**9), ("3mib", 3 << 20)]
)
def test_sizes_are_bytes_or_carry_a_unit(text: str, found: int) -> None:
    assert option_values.parse_size(text) == found


def test_ports_are_a_range_with_both_ends() -> None:
    assert option_values.parse_ports("7000-7010") == (7000, 7010)


def test_assignments_keep_equal_signs_in_the_value() -> None:
    assert option_values.parse_assignments(["init=a=b", "steps=3"]) == {"init": "a=b", "steps": "3"}


def test_times_leave_what_they_do_not_name_at_its_unit_cost() -> None:
    assert option_values.parse_action_costs("f=2, W=0.5") == Costs(forward=2, weight=0.5)


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def test_a_range_without_room_for_all_nodes_is_refused(used_port: int) -> None:
    with pytest.raises(UsageError, match=r"has 0 free ports on 127\.0\.0\.1, and 1 nodes need 2"):
        check_free_ports((used_port, used_port), nodes=1)
