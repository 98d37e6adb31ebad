"""PyTorch's own attention where it computes the same function, otherwise tiles in eager PyTorch."""
