"""The portable path: one set of Triton kernels for NVIDIA and AMD, and an independent compiler.

Nothing here imports triton until a call or an ahead-of-time compilation needs it.
"""
