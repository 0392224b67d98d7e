"""Kubernetes operator: its types (`api`), the observed state (`observed`) and its loop (`controller`)."""
