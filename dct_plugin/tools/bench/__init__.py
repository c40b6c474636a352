"""``dct bench``: what the plugin and its peers take on links of a chosen rate."""
