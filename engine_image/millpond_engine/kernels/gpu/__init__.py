"""Triton kernels and their host side. Only a runner on a GPU imports this: the CPU image has no Triton."""
