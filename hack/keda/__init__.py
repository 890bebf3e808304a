"""KEDA's operator and metrics adapter, compiled from KEDA's own Go module, for the suite that has it own a pool's count."""
