"""The objects that a DisaggDeployment becomes, as manifests. Pure: the same deployment gives the same bytes.

Rules:

1. Everything is named after the deployment and carries its labels and an owner reference, so that it goes when the deployment goes.
2. Workers have one child for each role and revision: a Deployment, or a LeaderWorkerSet where a replica has several nodes. Where that kind
   is not served, each such replica is a StatefulSet of its own, whose pods find the same variables as a LeaderWorkerSet's. Pods never
   change: another specification is another revision, and `operators.scaling` moves replicas from one to the other. Of Deployments and
   LeaderWorkerSets `replicas` is not part of the manifest: whoever applies this has to say it.
3. A worker finds its routers by their control Service, which has no address of its own but names all their pods, and registers with each
   by pod name and address. Nothing else is needed to be found. Settings are a file in a ConfigMap; what only the pod knows is put in by `--set`.
4. What a user's `podTemplate` says counts: lists that have names (containers, environment, volumes, ports, mounts) are merged by them, other values
   are replaced.
5. Pods run as nobody, without privileges, with a read-only root; what they write goes to memory or to an emptyDir, and models that they
   fetch to the claim that keeps them, if one is named.

Whoever reconciles asks `shared` and `workloads` for manifests; `settings`, `pods`, `network`, `policies` and `monitoring` are a kind of child, or a part of
one, each; `names` and `manifests` are what they have in common.
"""
