"""Step-ahead: gradients are taken at the weights that the unsent entries would lead to.

An add-on of the reducer. Without it, delete this package and its row in :mod:`..add_ons`.
"""
