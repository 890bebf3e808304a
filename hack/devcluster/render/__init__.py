"""Pure builders: command lines and configuration files from addresses and paths."""
