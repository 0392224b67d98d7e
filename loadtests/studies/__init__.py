"""Studies on the simulator: questions that an operator asks before GPUs are bought, each with the answer that was found.

    python -m loadtests.studies NAME [--json FILE] [--seeds A:B] [--processes N] [--requests N]
    python -m loadtests.studies --list

Rules:

1. A study is scenarios (the TOML files beside this), and findings: what they showed when the study was written, as ranges. It prints
   tables, and ends with status 1 when a finding no longer holds: then the simulator or a policy has changed what it says.
2. A finding says how far it is from what was wanted, where something was. A target that is missed stays in the table as missed.
3. Policies that are compared get the same requests at the same instants, and the same seeds.
4. What was chosen by looking at requests is reported on others: the first half of a trace is for tuning, the second for figures.
"""
