"""Tables in shared memory."""

from __future__ import annotations

from culm.gnn.transport.shared_tables import SharedTables, map_tables


def test_tables_are_mapped_in_place_and_only_with_the_right_secret() -> None:
    shared = SharedTables({"a": ("float32", (3, 2)), "none": ("float32", (0, 2))})
    mapped = map_tables(shared.layout)
    assert mapped is not None
    shared.tables["a"][1, 1] = 7.0
    assert mapped["a"][1, 1] == 7.0
    wrong_secret = type(shared.layout)(shared.layout.path, b"x" * 32, shared.layout.size, shared.layout.tables)
    assert map_tables(wrong_secret) is None
    assert map_tables(type(shared.layout)("/proc/1/fd/9999", b"", 1, {})) is None
