"""GLM-5.3-Flash on one to eight ranks, with the conversation's KV spread over them.

The engine knows tokens, weights, KV pages and ranks. It knows no sockets and no screen: what talks
to people sits in front of it.
"""
