"""A real node and several client processes, killed at random, looked at afterwards.

    python -m loadtests.kvstore.torture --seconds 600 --json [--seed N] [--settings FILE] [--ssd] [--redis]

Rules:

1. What a block holds follows from its namespace and its name (`content`), so every byte that any reader is given is
   compared with what it has to be. A miss is always right; a wrong byte never.
2. Clients do what workers do, and what broken workers do: they pause in the middle of a write, forget their leases, read
   with matches that ended long ago, publish checksums that are lies, and send garbage to every socket (`client`).
3. Processes are killed (SIGKILL) and stopped (SIGSTOP) at random moments: clients, the node, Redis. A call of a client
   that lasts longer than the client's documented deadlines, by a clock that stands still while that process is stopped,
   is a hang (`watchdog`).
4. At the end nothing may be left: see `leaks`.
5. The seed fixes what everybody decides to do; when processes meet is up to the machine.
"""
