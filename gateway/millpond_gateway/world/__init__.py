"""What the gateway knows about pools and replicas, from the Kubernetes API, from flags and from the engines."""
