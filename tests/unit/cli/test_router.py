"""`fleet router`."""

import json

from fleet.cli.main import run
from fleet.router.policies.built_in import BUILT_IN


def test_the_policies_are_listed_one_a_line_with_the_default_marked(capsys):
    assert run(["router", "policies"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(BUILT_IN.policies)]] == list(BUILT_IN.policies)
    assert [line.endswith("(default)") for line in lines].count(True) == 1
    assert lines[0].startswith("fleet ")


def test_the_policies_as_json_have_their_parameters(capsys):
    assert run(["router", "policies", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["default"] == "fleet"
    by_name = {each["name"]: each for each in told["policies"]}
    assert by_name["dynamo"]["parameters"]["host_cache_hit_weight"] == 0.75
    assert all(each["summary"] for each in by_name.values())
