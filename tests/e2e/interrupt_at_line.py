"""blocktrain, with a Ctrl-C at the moment when it prints a line with some words. Started by test_train_process.py:

    python interrupt_at_line.py WORDS ARGUMENTS...

The signal comes from inside, so that it does not depend on how fast the test reads."""

from __future__ import annotations

import os
import signal
import sys

from blocktrain.cli.main import main
from blocktrain.cli.shared import progress


def interrupt_at(words: str) -> None:
    print_line = progress.say

    def say(text: str) -> None:
        print_line(text)
        if words in text:
            os.killpg(0, signal.SIGINT)  # as a terminal does: to all processes of the group

    progress.say = say


if __name__ == "__main__":
    interrupt_at(sys.argv.pop(1))
    main()
