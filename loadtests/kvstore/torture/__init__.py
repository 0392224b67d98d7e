"""Torture test: a real store node and several client processes are killed at random; wrong bytes, hangs and leaks are findings.

    python -m loadtests.kvstore.torture --seconds 600 --json [--seed N] [--settings FILE] [--ssd] [--redis]

Rules:

1. The content of a block follows from its namespace and its name (`content`), so every byte that a reader gets is checked. A miss is
   always allowed, a wrong byte never.
2. Clients behave like workers, and also like broken workers (`client`): they pause in the middle of a write, do not release their
leases, read with leases that ended long ago, publish wrong checksums, and send garbage to every socket.
3. Clients, the node and Redis are killed (SIGKILL) and stopped (SIGSTOP) at random moments. A call that lasts longer than the client's
   documented deadlines is a hang (`watchdog`). Time in which the client process itself is stopped does not count.
4. Nothing may be left at the end (`leaks`).
5. The seed determines all decisions; the exact timing depends on the machine.
"""
