"""The dashboard: what a running engine holds and does, from one telemetry tree.

`Dashboard` hands each tree to its panels, one a file; a panel draws what changed and nothing else.
"""

from tui.dashboard.dashboard import Dashboard

__all__ = ["Dashboard"]
