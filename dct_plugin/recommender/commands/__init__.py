"""The commands ``dct demo`` and ``dct dlrm``."""
