"""The Kubernetes operator and its autoscaler."""
