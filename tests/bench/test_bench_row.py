"""``bench row`` measures every series, and what it calls a floor has less to do than we have."""

import json

from bench import row


def test_row(capsys) -> None:
    assert row.main(["--keys", "3000", "--batch", "700", "--rounds", "2", "--profile", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert found["keys"] == 3000
    spent = found["us_per_key"]
    assert set(spent) == {"row", "tuple", "first", "get", "generator_floor", "loop_floor", "row_alone"}
    assert 0 < spent["loop_floor"] < spent["generator_floor"]
    assert 0 < spent["row_alone"] < spent["row"]
    assert spent["loop_floor"] < spent["get"] < spent["row"]
    assert "handleInputRows" in captured.err
