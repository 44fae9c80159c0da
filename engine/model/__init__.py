"""What a layer computes outside the DSA stages: linear maps, norms, stream mixing, KDA, experts.

Each file is one operation on rows of float32 and knows neither pages nor ranks: a rank hands in the
weights it holds and gets its partial sum, which the caller adds up in rank order. A row's bits
depend on that row alone (for KDA, and on the rows of its conversation before it), never on how many
rows share the call or how a prompt was cut into calls.
"""
