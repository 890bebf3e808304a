"""Kernels for CPUs: one C++ source, compiled once per instruction set, called without a torch header."""
