"""Steps of the plugin and of its peers on links of a chosen rate; :mod:`.__main__` is the command."""
