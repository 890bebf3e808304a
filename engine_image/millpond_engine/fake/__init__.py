"""The fake runner: scripted tokens and a cost model behind the Runner protocol. No torch."""
