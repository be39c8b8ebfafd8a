"""The command line: one module a command, the only room that prints. Next: main.py."""
