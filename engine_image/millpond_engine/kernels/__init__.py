"""Attention and fused kernels: Triton for GPUs, a compiled extension for CPUs, torch as the oracle of both."""
