"""The production router machine over engines in virtual time: which policy serves recorded and made-up requests best.

Rules:

1. The router is `fleet.router.machine.RouterMachine` with a policy by name, and nothing of it is replaced: it hears of arrivals,
   steps and caches, and its dispatches are obeyed at once. Pace, queue and bookings are its own.
2. An engine (`engine`) is continuous batching with chunked prefill by the straight lines of `fleet.hardware.latency`, and a
   prefix cache that forgets what was not used for longest. It jumps from change to change of its batch, so that a request
   costs a fraction of a millisecond of real time. How long a step takes, only the engine knows: policies learn what they can.
3. All policies get the same requests, from the same seed, at the same times. A turn that needs an answer begins when that has
   ended; everything else comes when it comes, whether the cluster keeps up or not.
4. *Goodput* is the judge: requests a second whose first token came within a goal and whose other tokens came, on average, at
   a pace within another. Goals are those of the workload and the engine (`outcome`), and the same for everybody.
"""
