"""Fleet's router under load. Four programs; each says in its own words how it is run and what counts.

- `python -m loadtests.router`: beside other routers. Real processes, the same light workers and the same client for all, in turn.
  `scenarios` says what is asked, `targets` and `peers` who answers, `contest` how a round goes, `figures` what the table shows.
  `client`, `workers` and `relay` (the least that any relay costs) are the parts that have to be light; `grpc_stream` is Fleet's
  other front, which has no peer.
- `python -m loadtests.router.soak`: alone, for half an hour, while workers come, go, hang and die.
- `python -m loadtests.router.leaderboard`: its placement policies against each other, in virtual time; `traffic` is what is
  asked there, `cluster` who answers.
- `python -m loadtests.router.index_figures`: its prefix index against a plain one.
"""
