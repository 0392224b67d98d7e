"""Studies with the simulator: questions before GPUs are bought, with the answers that were found.

    python -m loadtests.studies NAME [--json FILE] [--seeds A:B] [--processes N] [--requests N]
    python -m loadtests.studies --list

Rules:

1. A study consists of scenarios (the TOML files in this folder) and findings, which are the results when the study was written, as
   ranges. It prints tables, and ends with status 1 if a finding no longer holds because the simulator or a policy has changed.
2. A finding with a target says how far it is from the target. A target that is missed stays in the table as missed.
3. Compared policies get the same requests at the same instants, and the same seeds.
4. Parameters are tuned on other requests than those of the figures: the first half of a trace is for tuning, the second for figures.
"""
