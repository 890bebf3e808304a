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

Two prices differ from a plain sum of uncached tokens, because a replay of generated traces showed them to matter
(`benchmarks.gateway_policy`). The price of recompute follows the pool's utilization: at low load nobody waits
behind the recomputed tokens. And a missing prefix that several sessions share is priced at its own time: with the
full price a hot system prompt stayed on one replica until seconds of queue had built up there.
"""
