"""A router for half an hour at 70 % of what it can do, while workers join, leave, hang and die; every token is looked at.

    python -m loadtests.router.soak --seconds 1800 --json [--seed N] [--load SHARE] [--harm-every SECONDS]

Rules:

1. Everything is a real process, started as in production: a router, a store node, workers with the simulated engine, some for
   whole requests and some for prompts. They find each other through the registry.
2. What the answer to a prompt has to be follows from the prompt and the engine's model, without an engine (`answers`): each
   token depends on every byte of KV before it. So every stream is compared, token by token over gRPC; over HTTP its text, and
   the tokens that its last event lists.
3. Capacity is measured first, with more and more clients who each ask again as soon as they are answered; then requests come
   at a share of it, at random times, whether or not earlier ones have been answered.
4. *Lost* is a token that a stream which ended well did not bring, and every token that a stream owes which does not end in
   time; *repeated* is one that it brought and should not have. A stream that somebody's death interrupts goes on, and nobody
   can tell; only where sampling has a state that died with the worker it ends, with WORKER_LOST. Who is refused before its
   first token is told that a retry is worth it. All these are counted by reason; anything else is a broken promise.
5. Some clients leave in the middle of an answer. At the end nothing may be left of anybody: no request, no booking, no
   connection, no open file; and the memory of the second half of the run must not grow (`trend`).
6. The seed fixes who asks for what and who is harmed in which order; when processes meet is up to the machine.
"""
