"""Load tests of the simulator."""
