"""The demo: python -m demo [--clean] [--quick]."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from demo.chat import ask
from demo.cluster import find_cluster
from demo.errors import DemoError
from demo.forward import port_forward
from demo.install import Site, make_pool, push_images, serve_model
from demo.load import Tally, Verdict, run_load
from demo.local import start_fleet
from demo.steps import run, say, step

MODEL = "smollm2"
QUESTION = "What is the capital of France?"
SYSTEM = (
    "You answer questions about a mill and its pond. The mill stands at the outflow of the pond; the sluice keeper opens the "
    "gate in the morning, when the miller asks for water, and closes it at night. The pond holds water for nine days of "
    "grinding. In dry summers the keeper lets only half the gate open, and the miller grinds every second day. The wheel is of "
    "oak, fourteen feet across, and was built anew after the flood. Answer in one short sentence."
)

CALM = [f"Tell me about the number {number}." for number in range(8)]
BURST = [f"{number}: " + "The miller asks for water. " * 40 for number in range(10_000)]
BURST_STREAMS = 32
PATIENCE = 20
"""How often a stream comes back when a machine is too slow for the burst and the gateway sheds it."""
MIN_REPLICAS = 2
# However fast the machine: so many prompts at once leave more than a thousand tokens waiting at each replica.
SCALING = {"minReplicas": MIN_REPLICAS, "maxReplicas": 3, "targets": {"queuedTokens": 1000}}


def main() -> int:
    """Run the demo, or clean up after it."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument(
        "--clean", action="store_true", help="remove what the demo made, the cluster included"
    )
    parser.add_argument("--quick", action="store_true", help="stop after the first streamed answer")
    parser.add_argument(
        "--local", action="store_true", help="no Kubernetes: two engines and a gateway as plain processes"
    )
    arguments = parser.parse_args()
    if arguments.local:
        with ExitStack() as stack:
            show_local(stack)
        return 0
    if arguments.clean:
        run([sys.executable, "-m", "devcluster", "down"], what="taking the cluster down", show=True)
        return 0
    with ExitStack() as stack:
        show(stack, quick=arguments.quick)
    return 0


def show(stack: ExitStack, *, quick: bool) -> None:
    """The main job, step by step."""
    with step("a real Kubernetes cluster"):
        cluster = find_cluster()
    site = Site(cluster)
    with step("the three images"):
        images = push_images(cluster)
    with step("helm install"):
        site.install_chart(images)
    with step("the model file, and kubectl apply of examples/01-quickstart.yaml"):
        model, server = serve_model(cluster)
        if server is not None:
            stack.callback(server.terminate)
        site.make_namespace()
        site.remove_pools()
        pool = make_pool(model, namespace=site.namespace)
        site.apply(pool)
    with step("the pool becomes Ready: every replica has answered a real request"):
        site.wait_ready(MODEL)
        print(site.run_kubectl("get", "mpool", "-o", "wide", what="kubectl get mpool"))
    url = stack.enter_context(port_forward(cluster, site.namespace, "service/millpond-gateway", 80))
    with step(f"a streamed answer through the gateway: {QUESTION}"):
        answer = ask(url, MODEL, QUESTION)
        say(f"first token after {answer.first_token_seconds * 1000:.0f} ms")
    if not quick:
        show_prefix_cache(url)
        pool = show_burst(site, url, pool)
        show_rollout(site, url, pool)
    finish(site)


def show_local(stack: ExitStack) -> None:
    """The same requests against plain processes."""
    url = start_fleet(stack)
    with step(f"a streamed answer through the gateway: {QUESTION}"):
        answer = ask(url, MODEL, QUESTION)
        say(f"first token after {answer.first_token_seconds * 1000:.0f} ms")
    show_prefix_cache(url)


def show_prefix_cache(url: str) -> None:
    """Two requests with one system prompt: the second finds the first one's prefix."""
    with step("two requests with the same long system prompt: the second hits the prefix cache"):
        for question in ("How large is the wheel?", "When does the keeper open the gate?"):
            answer = ask(url, MODEL, question, system=SYSTEM, max_tokens=32)
            say(
                f"prompt {answer.prompt_tokens} tokens, cached {answer.cached_tokens}, "
                f"first token after {answer.first_token_seconds * 1000:.0f} ms"
            )
        if answer.cached_tokens == 0:
            raise DemoError(
                "the second request found no cached prefix",
                hint="see the gateway's metrics for the replica it chose",
            )


def show_burst(site: Site, url: str, pool: dict[str, Any]) -> dict[str, Any]:
    """Hand the count to the autoscaler, send more than two replicas can take, and wait for the third.

    Returns:
        The pool as it is now, with `scaling` instead of `replicas`.
    """
    spec = {key: value for key, value in pool["spec"].items() if key != "replicas"}
    elastic = {**pool, "spec": {**spec, "scaling": SCALING}}
    with step(f"a burst of {BURST_STREAMS} streams at once, every prompt new, makes the pool grow"):
        site.apply(elastic)
        tally = asyncio.run(_load_while(url, BURST, BURST_STREAMS, lambda: _wait_grown(site)))
        _judge(tally)
    return elastic


def _wait_grown(site: Site) -> None:
    pool = site.wait_for(MODEL, _is_grown, what="grows to three replicas", seconds=180)
    scaling = pool["status"]["scaling"]
    say(
        f"decision {scaling['decision']} because {scaling['reason']}: demand {scaling['demandTokensPerSecond']} "
        f"tokens/s, one replica sustains {scaling.get('capacityTokensPerSecond', 'an unknown number')}"
    )
    site.wait_ready(MODEL)


def _is_grown(pool: Mapping[str, Any]) -> bool:
    status = pool.get("status", {})
    return int(status.get("desiredReplicas") or 0) > MIN_REPLICAS


def show_rollout(site: Site, url: str, pool: dict[str, Any]) -> None:
    """Roll the pool to a new revision while streams run; none may be lost."""
    with step("a new revision rolls out while clients stream"):
        tally = asyncio.run(_load_while(url, CALM, 4, lambda: _roll(site, pool)))
        _judge(tally)


def _judge(tally: Tally) -> None:
    say(f"{tally.total} streams: {tally}")
    if tally.num_waits:
        say(f"the gateway told streams to come back later {tally.num_waits} times, and they did")
    if tally.total != tally.counts[Verdict.COMPLETE]:
        raise DemoError(
            f"streams were not whole: {tally.details}", hint="kubectl logs of gateway and engine pods"
        )


async def _load_while(
    url: str, prompts: Sequence[str], concurrency: int, change: Callable[[], None]
) -> Tally:
    """Keep streams open until a change is through."""
    stop = asyncio.Event()
    load = asyncio.create_task(
        run_load(
            url,
            model=MODEL,
            prompts=prompts,
            tokens=24,
            concurrency=concurrency,
            stop=stop,
            patience=PATIENCE,
        )
    )
    try:
        await asyncio.to_thread(change)
    finally:
        stop.set()
        tally = await load
    return tally


def _roll(site: Site, pool: dict[str, Any]) -> None:
    engine = {**pool["spec"].get("engine", {}), "env": [{"name": "MILLPOND_DEMO_ROLLOUT", "value": "2"}]}
    site.apply({**pool, "spec": {**pool["spec"], "engine": engine}})
    site.wait_ready(MODEL)


def finish(site: Site) -> None:
    """Say how to go on."""
    kubectl = f"KUBECONFIG={site.cluster.kubeconfig} {site.cluster.kubectl}"
    print(f"""
The pool is running. How to go on:
    {kubectl} -n {site.namespace} get mpool -o wide
    {kubectl} -n {site.namespace} port-forward service/millpond-gateway 8080:80
    curl localhost:8080/v1/chat/completions -H 'content-type: application/json' \\
      -d '{{"model": "{MODEL}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
Dashboards for Grafana lie in charts/millpond/files; --set monitoring.dashboards.enabled=true installs them with the chart.
Clean up: make demo-clean""")


if __name__ == "__main__":
    sys.exit(main())
