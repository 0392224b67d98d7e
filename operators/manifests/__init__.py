"""Manifests: the child objects of a DisaggDeployment. Pure: the same deployment gives the same bytes.

Rules:

1. Every child is named after the deployment and carries its labels and an owner reference, so that it is removed with
   the deployment.
2. Workers have one child for each role and revision: a Deployment, or a LeaderWorkerSet if a replica has several nodes.
   If that kind is missing, each such replica is a StatefulSet of its own, whose pods get the same variables as a
   LeaderWorkerSet's. Pods never change: another specification is another revision, and `operators.replica_steps` moves
   replicas from one to the other. The manifests of Deployments and LeaderWorkerSets have no `replicas`; the caller has
   to add them.
3. A worker finds its routers by their control Service, which has no address of its own but resolves to all their pods,
   and registers with each by pod name and address. Settings are a file in a ConfigMap; `--set` adds what only the pod
   knows.
4. A user's `podTemplate` overrides ours: lists with names (containers, environment, volumes, ports, mounts) are merged
   by name, and other values are replaced.
5. Pods run as nobody, without privileges, with a read-only root. They write to memory or to an emptyDir, and fetched
   models to the claim that keeps them, if one is named.

The controller calls `shared` and `workloads`. `settings`, `pods`, `services` and `policies` make one kind of child, or
a part of one, each. `names` and `objects` are used by all.
"""
