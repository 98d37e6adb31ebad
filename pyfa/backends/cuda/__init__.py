"""The ``cuda`` backend: NVIDIA's GPUs from Ampere on."""
