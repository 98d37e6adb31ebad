"""HIP kernels for CDNA 3: one set of plans, `hip` on an AMD GPU and `emulator` on any CPU."""
