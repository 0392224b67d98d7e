"""Tests of the recorded messages: no field of the previous version may disappear or change."""

import pytest

from tests.support.versions.previous_version import COMMIT, ROOT
from tests.support.versions.proto_contract import breaks, contract_of, recorded_contract

MESSAGE = 'syntax = "proto3";\npackage fleet.v1;\n'


def contract_with(folder, text):
    folder.mkdir()
    (folder / "one.proto").write_text(MESSAGE + text)
    return contract_of(folder)


def test_messages_keep_what_the_previous_version_reads():
    """Compare all messages with the recorded ones.

    A failure means that the previous version would misread messages of this one: see "Change a message" in CONTRIBUTING.md.
    """
    recorded = recorded_contract()
    assert recorded["commit"] == COMMIT
    assert len(recorded["messages"]) > 100
    assert breaks(recorded, contract_of(ROOT / "proto")) == []


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ("message A { string b = 1; uint32 c = 2; uint32 d = 3; }", []),
        ("message A { string b = 1; }", ["fleet.v1.A: 2 (uint32 c) has disappeared"]),
        ("message A { string b = 1; uint32 c = 3; }", ["fleet.v1.A: 2 (uint32 c) has disappeared"]),
        ("message A { string b = 1; uint64 c = 2; }", ["fleet.v1.A: 2 was uint32 c, and is uint64 c"]),
        (
            "message A { string b = 1; repeated uint32 c = 2; }",
            ["fleet.v1.A: 2 was uint32 c, and is repeated uint32 c"],
        ),
        (
            "message A { oneof x { string b = 1; } uint32 c = 2; }",
            ["fleet.v1.A: 1 was string b, and is optional string b of x"],
        ),
        ("message B { string b = 1; }", ["fleet.v1.A has disappeared"]),
    ],
)
def test_changed_message_is_named_and_new_field_is_allowed(tmp_path, changed, broken):
    recorded = contract_with(tmp_path / "before", "message A { string b = 1; uint32 c = 2; }")
    assert breaks(recorded, contract_with(tmp_path / "after", changed)) == broken


def test_changed_value_and_changed_method_are_named(tmp_path):
    before = "enum E { ZERO = 0; ONE = 1; } message A {} message B {} service S { rpc Do(A) returns (B); }"
    after = "enum E { ZERO = 0; TWO = 1; } message A {} message B {} service S { rpc Do(A) returns (stream B); }"
    recorded = contract_with(tmp_path / "before", before)
    assert breaks(recorded, contract_with(tmp_path / "after", after)) == [
        "fleet.v1.E: 1 was ONE, and is TWO",
        "fleet.v1.S.Do was fleet.v1.A -> fleet.v1.B, and is fleet.v1.A -> stream fleet.v1.B",
    ]
