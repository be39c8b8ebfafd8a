"""`blocktrain` and `python -m blocktrain` are the command line. Loading it takes a moment, in which a Ctrl-C shall not
show a traceback. Next: cli/main.py."""

import sys


def main() -> None:
    try:
        from blocktrain.cli.main import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: nothing was started yet\n")
        sys.exit(130)  # EXIT_INTERRUPTED of cli/options.py, which is not loaded yet
    command_line()


if __name__ == "__main__":  # a child process of --jobs imports this module again
    main()
