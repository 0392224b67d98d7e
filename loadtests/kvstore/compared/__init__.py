"""Other KV stores, each in a virtual environment and a process of its own, spoken to through their public API only."""
