"""API types: the only definition of `DisaggDeployment`, `RoleScaler`, `ServingPlan` and `ServingRequest`.

Rules:

1. The CRDs are generated from these types (`operators.chart.crds`). Each kind has a module. Bounds, defaults and CEL
   rules are defined here and nowhere else. For each rule, the tests have an object that the rule refuses.
2. Rules use only the core of CEL and its string functions, because the tests run the same rules with a CEL
   implementation that has nothing else. Every list and string has a bound, because the API server estimates the cost of
   a rule and refuses rules over unbounded values.
3. Only one source sets a role's number of replicas; `scaling.mode` names this source. In the modes External and Planner,
   the role's field `replicas` is only the first value of its RoleScaler. Later values of the RoleScaler are not written
   back to the field `replicas`.
4. `podTemplate` has no schema here (a pod's schema is 700 KB, and clients cannot apply more than 256 KiB). The API
   server checks it when the operator creates the child object, and the answer of the API server becomes a condition.
5. No field is called n, y, on or off, because YAML 1.1 and kubectl read these as booleans.
"""
