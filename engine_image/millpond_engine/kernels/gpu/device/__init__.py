"""What runs on the device: Triton programs alone, no host code.

Constants of a model and a launch are `constexpr` parameters in capitals; what changes from step to step is a
runtime number that the compiler does not specialize on, so that no step waits for a compilation.
"""
