"""A port of this machine that leads to the gateway's Service."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from demo.cluster import Cluster
from demo.errors import DemoError
from demo.steps import ROOT


@contextmanager
def port_forward(cluster: Cluster, namespace: str, target: str, port: int) -> Iterator[str]:
    """Run kubectl port-forward; give the base URL; end it.

    Raises:
        DemoError: it does not come up within 20 s.
    """
    command = [cluster.kubectl, "-n", namespace, "port-forward", "--address", "127.0.0.1", target, f":{port}"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, **cluster.env},
        start_new_session=True,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(20, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        if found is None:
            raise DemoError(
                f"port-forward to {target} did not start: {line.strip()}",
                hint="is the gateway running? kubectl get pods",
            )
        watchdog.cancel()
        # Later lines ("Handling connection ...") must be drained, or kubectl blocks on a full pipe.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        watchdog.cancel()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=10)
