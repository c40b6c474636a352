"""Local steps: ranks train alone for some steps, then exchange their progress.

An add-on of the reducer. Without it, delete this package and its row in :mod:`..add_ons`.
"""
