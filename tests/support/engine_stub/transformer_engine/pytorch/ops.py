class FusibleOperation:
    """Empty."""


class Sequential:
    """Empty."""
