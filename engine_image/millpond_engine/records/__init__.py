"""The language between server, loop, runner and core: frozen records, no behaviour, no tensors, no text."""
