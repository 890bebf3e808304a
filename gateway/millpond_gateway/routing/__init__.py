"""Pure decisions of the gateway: which replica serves a request.

    router      one pool: choose, reserve, first_token, release; the face for everybody else
    candidates  who may serve at all; every drop has a reason
    cost        the rule, term by term
    policies    one choice over the scores; ties by the seeded generator
    partition   the choice while peers are unreachable
    load        reservations of all gateways, summed per replica
    speed       learned prefill speed
    index       expected cached tokens from three layers:
    routed        what this fleet of gateways routed
    held, stream  what the engines' KV events say, and how far to trust them (kvevents decodes)
    shared      decisions to and from the other gateway processes (wire is their form)
    keys        block keys of prompts, from tokens or from text

Three things differ from a plain sum of uncached tokens, because replays of generated traces showed them to matter
(`benchmarks.gateway_policy`). The price of recompute follows the pool's utilization: at low load nobody waits
behind the recomputed tokens. A missing prefix that several sessions share gets cheaper with every use that another
copy can expect before its eviction: at the full price a hot system prompt stayed on one replica until seconds of
queue had built up there, and at half of it rare ones drove everybody's history out of the caches. And a prompt in
prefill counts for what is left of it: counted whole until its first token, a long one sent others away for nothing.
"""
