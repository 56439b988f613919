"""The report of runs: one HTML file that needs no network, or the same page served on loopback.

    metrics.jsonl ──▶ figures.py ──▶ overview chunk ─┐
    trajectories/ ─┬▶ index.py ────▶ index chunk ────┼─▶ page.py   a file: chunks embedded, a sample of groups
    tokens/ ───────┴▶ tokens.py ───▶ group chunks ───┘   serve.py  on loopback: every group on demand, live

All content of the page comes in chunks (packed_arrays.py) of text and typed arrays, compressed. No text of a
model is ever part of the page's markup; the scripts in static/ show it by textContent alone.
"""
