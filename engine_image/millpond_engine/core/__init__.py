"""Pure scheduling: requests, block pool, prefix tree, scheduler. No torch, no clock, no I/O."""
