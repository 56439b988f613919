"""The report of runs: one HTML file that needs no network, or the same page served on loopback.

    metrics.jsonl ──▶ figures.py ──▶ overview chunk ─┐
    trajectories/ ─┬▶ index.py ────▶ index chunk ────┼─▶ page.py   a file: chunks embedded, a sample of groups
    tokens/ ───────┴▶ tokens.py ───▶ group chunks ───┘   serve.py  on loopback: every group on demand, live

All content of the page comes in chunks (packed_arrays.py) of text and typed arrays, compressed. No text of a
model is ever part of the page's markup; the scripts in static/ show it by textContent alone.

The plots are SVG of the page's own and no library's: uPlot 1.6.32 would replace 114 of the 403 lines of
plots.js by 94 and 55 kB, take 3 to 8 s instead of 2 s to draw 30 runs where there is no GPU, and take colours,
dark mode and printing out of the style sheet, since it draws on a canvas.
"""
