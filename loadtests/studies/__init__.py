"""Studies with the simulator: they answer questions that come up before GPUs are bought.

    python -m loadtests.studies NAME [--json FILE] [--seeds A:B] [--processes N] [--requests N]
    python -m loadtests.studies --list

Rules:

1. A study consists of scenarios (the TOML files in this folder) and findings. A finding is a figure, with the range that contained it
when the study was written. A study prints tables and findings, and ends with status 1 if a figure is now outside of its range.
2. A finding may have a target. Its printed line then says whether the target is met or missed. A missed target does not change the exit
status.
3. Compared policies get the same requests at the same instants, and the same seeds.
4. Parameters are not tuned on the requests of the reported figures: the first half of a trace is for tuning, the second for figures.
"""
