"""The automatic mode: settings are timed while the job trains, and the gentlest of the fastest stays.

An add-on of the reducer. Without it, delete this package and its row in :mod:`..add_ons`.
"""
