"""The KV pool: which pages exist, who holds them, and who leases them.

The pool counts and indexes pages; it knows rank and world as integers, and nothing of stages, of
the scheduler or of MPI.
"""
