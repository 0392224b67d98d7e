"""Kubernetes operator: custom kinds (`api`), state of the cluster (`observed`), and reconcile loop (`controller`)."""
