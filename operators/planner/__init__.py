"""Planner of a cluster: obeys the ServingPlans of its namespaces, each with a planner loop of its own.

`server` follows the API server and runs one `deployment_planner` for each plan; `translation` makes the settings of a planner from a plan and its
deployment; `demand` follows the deployment's routers; `status` says in the plan what its planner does.
"""
