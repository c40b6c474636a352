from .layernorm_linear import LayerNormLinear
from .linear import Linear

__all__ = ["LayerNormLinear", "Linear"]
