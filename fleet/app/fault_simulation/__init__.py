"""Fault simulation: runs production's machines in virtual time under randomly drawn faults (`fleet sim faults`).

`campaign` runs many seeds. `schedule` draws the requests and faults of one seed. `seed_run` performs them and asserts the
promises. The processes of the cluster are `router_process`, `worker_process` and `store_process`. Like production's
servers, they are thin shells around the machines that production runs. `virtual_network` can cut and slow connections,
and `virtual_process` can freeze and kill processes. `handoff_states` runs the code of handoff leases through all orders of
its steps.
"""
