"""Soak test: a router runs for half an hour at 70 % of the capacity while workers join, leave, hang and die; every token is checked.

    python -m loadtests.router.soak --seconds 1800 --json [--seed N] [--load SHARE] [--harm-every SECONDS]

Rules:

1. All parts are real processes, started as in production: a router, a store node, and workers with the simulated engine, one of
which only prefills. The workers register with the router.
2. The expected answer follows from the prompt and the simulated model, without an engine (`answers`); each token depends on every
   byte of KV before it. So every stream is compared: over gRPC token by token, over HTTP its text and the tokens of its last event.
3. The capacity is measured first, with more and more closed clients: each of these sends its next request after its last answer. Then
requests come at a share of the capacity, at random times, whether or not earlier requests have been answered.
4. An expected token is lost if a stream that ended well did not contain it, or if its stream did not end in time. A token is repeated
if a stream contains it although the expected answer does not. When a worker dies, its streams continue unchanged; only a stream whose
sampling state died with the worker may end with WORKER_LOST. A request may be rejected before its first token, with a reason that permits
a retry. These two cases are counted by reason; everything else is a broken promise.
5. Some clients cancel in the middle of an answer. At the end no request, reservation, connection or open file may be left, and memory
   must not grow in the second half of the run (`trend`).
6. The seed determines the requests and in which order workers join, leave, hang and die; the exact timing depends on the machine.
"""
