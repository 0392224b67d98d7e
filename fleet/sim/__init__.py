"""Simulator: runs the machines of production, such as the router machine, in virtual time with simulated engines, links and clients."""
