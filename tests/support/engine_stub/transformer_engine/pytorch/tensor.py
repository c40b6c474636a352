class QuantizedTensor:
    """Empty."""
