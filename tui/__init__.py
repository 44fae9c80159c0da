"""The console: a terminal picture of a running engine, and a chat with it. It speaks HTTP only."""
