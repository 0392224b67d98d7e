"""The simulator's own figures."""
