"""Simulator: runs production's machines, such as the router's, in virtual time with simulated engines, links and clients."""
