"""The recommender of ``dct demo`` and ``dct dlrm``: click data, models, a trainer, a report, two commands.

An example on top of the library and its integrations. It is installed as ``dct_plugin.recommender``.
"""
