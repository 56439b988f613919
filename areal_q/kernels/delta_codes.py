"""Loops of areal_q/weights/delta_codec.py over the elements that changed."""

from areal_q.kernels.jit import kernel


@kernel()
def tally(keys, count):
    """Adds to count, int64 [256], how often each key occurs, uint8 [N]."""
    for i in range(keys.shape[0]):
        count[keys[i]] += 1


@kernel()
def grouped(keys, values, at, out):
    """Writes the values into out in the order of their keys, uint8, those of equal keys in their own order: at,
    int64, has the place of each key's next value, and is moved on."""
    for i in range(keys.shape[0]):
        out[at[keys[i]]] = values[i]
        at[keys[i]] += 1


@kernel()
def ungrouped(keys, values, at, negative, out):
    """Writes the values into out in their first order, those that have a bit in `negative`, uint8, highest
    first, with the other sign: the inverse of `grouped`."""
    kind = out.dtype.type
    for i in range(keys.shape[0]):
        value = kind(values[at[keys[i]]])
        at[keys[i]] += 1
        sign = kind((negative[i >> 3] >> (7 - (i & 7))) & 1)
        out[i] = (value ^ (kind(0) - sign)) + sign
