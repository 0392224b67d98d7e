"""Manifests: builds the child objects of a DisaggDeployment. Pure: the same deployment gives the same bytes.

Rules:

1. The name of every child begins with the deployment's name. Every child has labels that name the deployment, and an owner
   reference, so that Kubernetes removes the child together with the deployment.
2. Workers have one child for each role and revision: a Deployment, or a LeaderWorkerSet if a replica has several nodes.
   If the cluster has no LeaderWorkerSets, each replica of several nodes is a StatefulSet of its own, whose pods get the
   environment variables that a LeaderWorkerSet would set. Pods are never changed: another specification gives another
   revision with new pods, and `operators.replica_steps` moves the replicas from the old revision to the new one. The
   manifests of Deployments and LeaderWorkerSets have no `replicas`; the caller has to add them.
3. A worker finds its routers by their control Service, which is headless and resolves to the addresses of all router
   pods. The worker registers with each router under the name and the address of its own pod. Settings are in a file
   from a ConfigMap; `--set` arguments add the settings that only the pod knows, such as its address.
4. The user's `podTemplate` overrides the pod template of the operator. Containers, environment variables, volumes and pull
   secrets are merged by name, ports by number and protocol, and mounts by path. Other lists and values are replaced.
5. Pods run as a user other than root, without privileges, with a read-only root file system. They write only to volumes:
   an emptyDir, or, for fetched models, the claim in `cacheClaim`. A user's `podTemplate` may change this.

The controller calls `shared` and `workloads`. The modules `settings`, `pods`, `services` and `policies` build single
children or parts of them. All of these modules use `names` and `objects`.
"""
