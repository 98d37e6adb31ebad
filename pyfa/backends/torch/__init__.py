"""PyTorch's own attention if it computes the same function, otherwise tiles in eager PyTorch."""
