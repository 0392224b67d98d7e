"""Simulator: the machines that run in production, in virtual time, on simulated engines, links and clients."""
