"""What several backends share: calls as ``kernels/`` takes them, and NVIDIA's driver."""
