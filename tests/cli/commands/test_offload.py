import pytest


@pytest.mark.parametrize("command", ["stage", "serve"])
def test_layers_of_a_training_run_cannot_be_left_on_a_disk_where_they_are_not(run, command):
    result = run(command, "bt://token@127.0.0.1:1#00", "--offload")
    assert result.exit_code == 2
    assert "blocktrain export it first" in result.stderr
