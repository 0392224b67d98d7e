"""The KV store against the limits of the machine, against its peers, and under fire."""
