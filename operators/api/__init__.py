"""What people write on Kubernetes: `DisaggDeployment`, `RoleScaler`, `ServingPlan`, `ServingRequest`. The one definition of them.

Rules:

1. CRDs are made from these types (`operators.chart.crds`), a module for each kind: bounds, defaults and CEL rules stand here and nowhere else. Each rule has a sample
   that it refuses in the tests.
2. Rules use the core of CEL and its strings only, so that the same text runs in the tests. Every list and string has a bound: the API
   server estimates what a rule costs, and refuses rules over things without one.
3. Replicas have one writer, named by `scaling.mode`. In External and Planner mode a role's `replicas` is where its RoleScaler starts,
   and is never written back.
4. `podTemplate` is not described here (a pod's schema is 700 KB, and what is larger than 256 KiB cannot be applied by clients): the API
   server checks it when the operator makes the child of it, and what it says becomes a condition.
5. No field is called n, y, on or off: YAML 1.1 reads these as booleans, and kubectl does.
"""
