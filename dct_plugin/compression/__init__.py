"""One compressed tensor: its threshold, its residual and its payloads."""
