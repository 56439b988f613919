"""The report of runs: one HTML file that needs no network, or the same page served on loopback.

    metrics.jsonl ──▶ figures.py ──▶ overview chunk ─┐
    trajectories/ ─┬▶ index.py ────▶ index chunk ────┼─▶ page.py   a file: chunks embedded, a sample of groups
    tokens/ ───────┴▶ tokens.py ───▶ group chunks ───┘   serve.py  on loopback: every group on demand, live

Whatever is shown travels as a chunk (chunks.py): text and typed arrays, compressed. So no text of a model is
ever part of the page's markup; static/ puts it on the screen by textContent alone.
"""
