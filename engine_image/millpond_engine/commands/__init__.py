"""What the subcommands of `millpond-engine` do; `cli.py` only parses and dispatches."""
