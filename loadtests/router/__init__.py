"""Load tests and benchmarks of Fleet's router. The docstring of each module says how to run it and what it measures.

- `python -m loadtests.router` compares Fleet with other routers. They run as real processes, in turn, with the same mock workers and
the same client. `scenarios` has the requests, `systems` the routers, `comparison` the rounds, and `figures` the table. `load.client` and
`mock_workers` use little CPU time, so that they do not limit the router. `systems.relay` is the cheapest possible relay, as a lower
limit of the cost. `grpc_stream` measures the gRPC frontend; the compared systems have none.
- `python -m loadtests.router.soak` runs the router alone for half an hour while workers join, leave, hang and die.
- `python -m loadtests.router.leaderboard` compares placement policies in virtual time; `simulated` has its traffic and cluster.
- `python -m loadtests.router.index_figures` compares the prefix index with a simple one.
- `python -m loadtests.router.parsing_cost` measures what it costs to parse answers with tool calls and reasoning.
"""
