"""Conformance suite for endpoint pickers (endpoint picker protocol 1.0), by plain gRPC and without a cluster.

`python -m tests.kube.picker --address HOST:PORT --json -` runs it against any picker.

Rules:

1. The suite knows nothing of the picker but its address. It learns the endpoints of the pool from the picker's own answers.
2. A case fails only for what the protocol or Envoy's `ext_proc` demands. Which endpoint a picker prefers is its own business.
3. A case that cannot tell is skipped with the reason: a pool of one endpoint shows nothing about subsets.
4. Each case is one call or more on one connection, and has a time limit. A case that fails does not stop the others.

The protocol is docs/proposals/004-endpoint-picker-protocol of https://github.com/kubernetes-sigs/gateway-api-inference-extension.
"""
