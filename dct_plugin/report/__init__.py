"""``dct report``: the figures of a run, in the terminal and as one HTML page.

``reading`` takes the metrics files, ``run`` computes the figures, ``advice`` says what to try next,
``metrics_part`` makes sentences, tables and a picture of them, and ``page`` shows and writes them.
"""
