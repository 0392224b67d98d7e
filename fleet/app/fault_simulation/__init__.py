"""Fault simulation: runs production's machines in virtual time under randomly drawn faults (`fleet sim faults`).

`campaign` runs many seeds. `schedule` draws the requests and faults of one seed. `seed_run` performs them and asserts the
promises. The processes of the cluster are `router_process`, `worker_process` and `store_process`. Like production's
servers, they are thin shells around the machines that production runs. Faults happen in `virtual_network` and
`virtual_process`. `handoff_states` runs the code of handoff leases through all orders of its steps.
"""
