"""How many replicas, and why: pure functions of a snapshot and `now`.

Demand is counted in uncached prompt tokens per second where they arrive, at the gateways, before
any engine sees them; capacity is what one replica was measured to sustain. Queue depth, TTFT and
KV-cache pressure are guards that can raise the result. Absence of data is a value: it holds.
"""
