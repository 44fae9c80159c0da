"""The five stages of a DSA layer, one file each: insert, score, merge, attend, project. They know
arrays, not ranks.
"""
