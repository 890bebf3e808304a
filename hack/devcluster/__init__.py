"""A real single-node Kubernetes for Millpond's tests and demo: `python -m devcluster up [--node]`."""
