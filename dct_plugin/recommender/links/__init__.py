"""Ranks on this machine behind links of a chosen rate, and what their steps take there."""
