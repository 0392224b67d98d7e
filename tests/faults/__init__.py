"""Fault matrix: every component under every fault in every phase of a request, on the simulated engine.

    python -m tests.faults --json FILE

Rules:

1. A cluster of real processes serves requests whose answers are known (`workers.engines.simulated.answer_oracle`). One experiment
   injects one fault into one component while requests are in all phases, and so fills one cell for each phase.
2. A cell says what clients saw: tokens lost, repeated and wrong, answers that ended with an error; what was leaked; and the seconds
   until a new request was answered. A cell in which no request was at the moment of the fault is an error of the experiment.
3. The clients, processes and nodes are those of the soak test and of the store's torture.
4. A combination that cannot happen, or that this machine cannot produce, is listed with its reason (`matrix.IMPOSSIBLE`).
"""
