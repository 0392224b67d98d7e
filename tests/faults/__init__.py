"""Fault matrix: every component under every fault in every phase of a request, on the simulated engine.

    python -m tests.faults --json FILE

Rules:

1. A cluster of real processes serves requests whose answers are known (`workers.engines.simulated.answer_oracle`). One experiment
injects one fault into one component while requests are in all phases, and so gives one cell for each phase.
2. A cell says what clients saw: how many tokens were lost, repeated or wrong, and how many answers ended with an error. It also says
what was leaked, and how many seconds later a new request was answered. If no request was in a phase at the moment of the fault, the
experiment has failed.
3. The clients, processes and nodes are those of the soak test and of the store's torture test.
4. A combination that cannot happen, or that this machine cannot produce, is listed with its reason (`matrix.IMPOSSIBLE`).
"""
