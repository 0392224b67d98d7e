"""Compared systems: other KV stores, each in its own virtual environment and process, called through their public API."""
