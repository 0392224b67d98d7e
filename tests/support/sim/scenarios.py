"""Scenario of `fleet sim` as text. Tests write its model, such as `model_configs.LLAMA_8B`, into `model.json` in the same folder."""

SCENARIO = """
model = "model.json"
seed = 3
[workload]
kind = "drawn"
requests = 100
rate = 8.0
prompt_tokens = 1000
output_tokens = 60
[[pools]]
role = "both"
gpu = "h100"
gpus = 2
[slo]
ttft_ms = 500
tpot_ms = 30
"""
