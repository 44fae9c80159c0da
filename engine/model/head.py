"""The output head: this rank's vocabulary rows of the logits.

Source: lm_head.weight, applied to the hidden state after the final norm; no bias, no scale.
"""

from engine.linear import linear


def head(hidden, weight):
    """hidden [n, hidden] float32 after the final norm -> [n, own vocabulary rows] float32."""
    return linear(hidden, weight)
