"""The portable path: one set of Triton kernels for NVIDIA and AMD, and an independent compiler.

This package imports triton only when a call or an ahead-of-time compilation needs it.
"""
