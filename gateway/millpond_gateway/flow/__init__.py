"""Pure decisions of the gateway: whether and when a request goes on.

    budget      tenants' concurrency and tokens per minute
    admission   admit, hold or shed, by the pool's predicted wait; Retry-After from measured speed
    queue       who of the held goes next: bands, deficit round robin on uncached tokens, starvation bound
    demand      what the autoscaler reads
    outliers    which replicas fail, judged over clients
    hedge       a second try for a late cold request
    pair        what to do when one leg of a prefill/decode pair fails

Everything takes `now` and returns a record with a reason; sockets, timers and the requests themselves live elsewhere.
"""
