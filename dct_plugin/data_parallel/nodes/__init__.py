"""Ranks of one machine: what they sum and gather among themselves, around exchanges between machines.

Without it, delete this package; ``nodes`` of the configuration then has to be 1.
"""
