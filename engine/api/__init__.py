"""HTTP: OpenAI-compatible routes, health, metrics and telemetry over a running engine.

The only importers of starlette and uvicorn. It knows the Hub (conversations in, tokens out), the
chat format and the telemetry; it knows nothing of ranks, pages or devices.
"""
