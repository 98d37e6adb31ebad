"""The host side of ``kernels/``, once for hip and cuda."""
