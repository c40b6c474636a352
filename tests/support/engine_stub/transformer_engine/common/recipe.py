class DelayedScaling:
    """Empty."""
