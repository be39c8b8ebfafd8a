"""Commands that only ask somebody do not wait two seconds for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMAND = """
import sys
from blocktrain.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--json"], ["pause"], ["resume"], ["ledger"]], ids=lambda words: " ".join(words)
)
def test_a_command_that_asks_a_coordinator_does_not_load_torch(swarm, command):
    name, *options = command
    words = [sys.executable, "-c", COMMAND, name, swarm.admin, *options]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    assert result.stderr.splitlines()[-1] == "False", result.stderr
