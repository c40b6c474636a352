"""``dct report``: one HTML page about a run.

``reading`` takes the metrics files, ``run`` computes the figures, ``advice`` says what to try next,
``metrics_part`` makes charts and tables of them with ``charts``, and ``page`` writes the file.
"""
