"""Conversations with the engine: what they are, where they are kept, and how they are shown."""
