"""Fault simulation: production's machines under drawn faults in virtual time (`fleet sim faults`).

`campaign` runs many seeds, `schedule` draws what happens in one, `seed_run` runs it and asserts the promises. The processes of
the cluster are `router_process`, `worker_process` and `store_process`: thin shells, as production's servers are, around the
machines that production runs. `virtual_network` and `virtual_process` are what may fail. `handoff_states` explores handoff leases.
"""
