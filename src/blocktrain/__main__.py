"""`python -m blocktrain` is the command line."""

from blocktrain.cli.main import main

if __name__ == "__main__":  # a child process of --jobs imports this module again
    main()
