"""Test-only: a stub of Transformer Engine, whose package does not import without CUDA.

Its linears compute on the CPU, and communicate in the order and by the functions of the real ones, which are
imported by name into each module. What megatron-core imports besides is empty.
"""

from . import common, pytorch

__version__ = "2.6.0"
__all__ = ["common", "pytorch"]
