"""Load tests of the KV store: benchmarks against the machine's limits and other stores, and a torture test."""
