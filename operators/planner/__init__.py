"""Planner of a cluster: carries out ServingPlans, and runs one planner loop for each of them.

`server` watches the API server and runs one `deployment_planner` for each plan. `translation` converts a plan and its
deployment to the settings of a planner. `demand` reads the demand of a deployment from its routers. `status` computes
the status of a plan.
"""
