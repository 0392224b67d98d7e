{{/* Beginning of every object's name: short enough for what comes after it. */}}
{{- define "fleet.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Of one component: (list root component). The instance is the release; children of DisaggDeployments have theirs. */}}
{{- define "fleet.selected" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Values.nameOverride | default $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "fleet.labels" -}}
{{- $root := index . 0 -}}
{{ include "fleet.selected" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/part-of: fleet
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* One of the release's own images: (list root image). */}}
{{- define "fleet.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}{{- $all := $root.Values.images -}}
{{- with $all.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default ($all.tag | default $root.Chart.AppVersion) }}{{ end -}}
{{- end -}}

{{/* Somebody else's image. */}}
{{- define "fleet.foreignImage" -}}
{{- .repository -}}{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end -}}
{{- end -}}

{{/* Name of a component's service account: (list root account name). */}}
{{- define "fleet.serviceAccountName" -}}
{{- $account := index . 1 -}}
{{- $account.name | default (ternary (index . 2) "default" $account.create) -}}
{{- end -}}

{{/* What Kubernetes' "restricted" level asks of a pod, and of a container. */}}
{{- define "fleet.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.user }}
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "fleet.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
{{- end -}}

{{/* Where pods go and who pulls: (list root component pods). Several of one component keep to different nodes, if they can. */}}
{{- define "fleet.scheduling" -}}
{{- $root := index . 0 -}}{{- $pods := index . 2 -}}
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with $pods.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pods.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pods.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if $pods.topologySpreadConstraints }}
{{- /* Without a selector a constraint counts no pods at all. */}}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "fleet.selected" . | fromYaml)) }}
{{- range $pods.topologySpreadConstraints }}
  - {{- toYaml (merge (deepCopy .) (ternary (dict) $own (hasKey . "labelSelector"))) | nindent 4 }}
{{- end }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "fleet.selected" . | nindent 8 }}
{{- end }}
{{- with $pods.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Resources of a component's container: (list root component). Those that the values name replace those of the preset. */}}
{{- define "fleet.resources" -}}
{{- $root := index . 0 -}}{{- $of := index $root.Values (index . 1) -}}
{{- $preset := dict -}}
{{- if ne $of.preset "None" -}}
{{- $preset = index ($root.Files.Get "files/presets.yaml" | fromYaml) (index . 1) $of.preset -}}
{{- end -}}
{{- with mergeOverwrite (deepCopy $preset) $of.pods.resources -}}
resources: {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* Labels of a component's pods: (list root component pods). The chart's version is not among them: it would restart everything. */}}
{{- define "fleet.podMetadata" -}}
{{- $pods := index . 2 -}}
labels:
{{- with $pods.labels }}
{{- omit . "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" | toYaml | nindent 2 }}
{{- end }}
  {{- include "fleet.selected" . | nindent 2 }}
  app.kubernetes.io/part-of: fleet
{{- with $pods.annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "fleet.tlsSecret" -}}
{{- if eq .Values.tls.source "Secret" -}}
{{- required "tls.secret: names the Secret with tls.crt, tls.key and ca.crt; tls.source is Secret" .Values.tls.secret -}}
{{- else -}}
{{- include "fleet.fullname" . }}-tls
{{- end -}}
{{- end -}}

{{/* Whether gateways ask one router at a time: each picks workers' own endpoints, and knows nothing of what the others have booked. */}}
{{- define "fleet.pickerLease" -}}
{{- $of := .Values.routers -}}
{{- if and $of.enabled $of.pickerLease (hasKey $of.settings "endpoint_picker") (not $of.settings.models) -}}true{{- end -}}
{{- end -}}

{{/* Whether routers have a control port, at which everybody has to prove who he is; else it is a Unix socket in the pod. */}}
{{- define "fleet.controlPort" -}}
{{- if or .Values.routers.controlSecret (ne .Values.tls.source "None") -}}true{{- end -}}
{{- end -}}

{{/* Whether router pods tell each other their state: they need a secret to prove, and each pod has one address for one process. */}}
{{- define "fleet.peers" -}}
{{- if and .Values.routers.controlSecret (eq (int .Values.routers.processes) 1) -}}true{{- end -}}
{{- end -}}

{{/* Who may read metrics at port 8080, as settings files say it; an empty object: what the processes do by default. */}}
{{- define "fleet.metricsReaders" -}}
{{- $access := .Values.monitoring.access -}}
{{- if and $access.open $access.keySha256 }}{{- fail "monitoring.access.open: contradicts keySha256: with a key, only its holders read the metrics" }}{{ end -}}
{{- if and $access.secret.name (not $access.keySha256) }}{{- fail "monitoring.access.secret: without the SHA-256 of its key in keySha256, the key opens nothing; set both" }}{{ end -}}
{{- if $access.open }}{{- dict "open" true | toJson -}}
{{- else if $access.keySha256 }}{{- dict "key_sha256" $access.keySha256 | toJson -}}
{{- else }}{{- dict | toJson -}}{{ end -}}
{{- end -}}

{{/* The scheme of probes of the operator and the planner, if it is not HTTP. */}}
{{- define "fleet.metricsScheme" -}}
{{- if .Values.monitoring.access.tlsSecret }}, scheme: HTTPS{{ end -}}
{{- end -}}

{{/* The key that a PodMonitor tells Prometheus to send. */}}
{{- define "fleet.metricsKey" -}}
{{- with .Values.monitoring.access.secret }}{{ if .name }}, authorization: {credentials: {name: {{ .name }}, key: {{ .key | quote }}}}{{ end }}{{ end -}}
{{- end -}}

{{/* What routers are told: the values' settings, and over them what follows from the chart's other values. */}}
{{- define "fleet.routerSettings" -}}
{{- $own := dict "http_listen" "0.0.0.0:8000" "grpc_listen" "0.0.0.0:50051" "health_listen" "0.0.0.0:8080" -}}
{{- if include "fleet.controlPort" . -}}
{{- $proof := dict -}}
{{- if ne .Values.tls.source "None" }}{{- $proof = include "fleet.tlsFiles" . | fromJson }}{{ end -}}
{{- if .Values.routers.controlSecret }}{{- $_ := set $proof "secret_file" "/etc/fleet/control/secret" }}{{ end -}}
{{- $_ := set $own "control_listen" "0.0.0.0:50052" -}}
{{- $_ := set $own "control_credentials" $proof -}}
{{- end -}}
{{- if include "fleet.peers" . -}}
{{- $control := printf "%s-routers-control.%s.svc" (include "fleet.fullname" .) .Release.Namespace -}}
{{- $_ := set $own "replicas_name" (printf "%s:50054" $control) -}}
{{- $_ := set $own "replicas_credentials" (dict "secret_file" "/etc/fleet/control/secret") -}}
{{- end -}}
{{- /* The time before the SIGTERM, and some to close. */}}
{{- $_ := set $own "drain_timeout_ms" (mul 1000 (sub (int .Values.routers.terminationSeconds) 10)) -}}
{{- if not (dig "metrics_access" dict .Values.routers.settings) -}}
{{- $readers := include "fleet.metricsReaders" . | fromJson -}}
{{- if $readers.open }}{{- $_ := set $own "metrics_access" (dict "ask_on_health" false) }}{{- else if $readers }}{{- $_ := set $own "metrics_access" $readers }}{{ end -}}
{{- end -}}
{{- if not (hasKey .Values.routers.settings "connection_seconds") }}{{- $_ := set $own "connection_seconds" 4 }}{{ end -}}
{{- with .Values.routers.tls.secret -}}
{{- $files := dict "certificate" "/etc/fleet/client-tls/tls.crt" "key" "/etc/fleet/client-tls/tls.key" -}}
{{- with $.Values.routers.tls.clientAuthority }}{{- $_ := set $files "client_authority" (printf "/etc/fleet/client-tls/%s" .) }}{{ end -}}
{{- if and $.Values.routers.tls.health $.Values.routers.tls.clientAuthority }}{{- fail "routers.tls.health: probes of Kubernetes show no certificate; leave it out, or clientAuthority" }}{{ end -}}
{{- if $.Values.routers.tls.health }}{{- $_ := set $files "health" true }}{{ end -}}
{{- if $.Values.routers.tls.endpointPicker }}{{- $_ := set $files "endpoint_picker" true }}{{ end -}}
{{- $_ := set $own "tls" $files -}}
{{- end -}}
{{- if .Values.routers.kserve }}{{- $_ := set $own "kserve_listen" "0.0.0.0:8001" }}{{ end -}}
{{- if ne .Values.tls.source "None" -}}
{{- range $end := list "worker_credentials" "store_credentials" -}}
{{- $_ := set $own $end (include "fleet.tlsFiles" $ | fromJson) -}}
{{- end -}}
{{- end -}}
{{- if include "fleet.pickerLease" . -}}
{{- $routers := printf "%s-routers" (include "fleet.fullname" .) -}}
{{- $lease := dict "name" (printf "%s-picker" $routers) "namespace" .Release.Namespace -}}
{{- $_ := set $lease "owner" $routers -}}
{{- $_ := set $lease "service" (printf "%s-picker" $routers) -}}
{{- $_ := set $own "endpoint_picker" (dict "lease" $lease) -}}
{{- end -}}
{{- if and .Values.redis.install (not .Values.routers.settings.tenants_redis) -}}
{{- $_ := set $own "tenants_redis" (printf "redis://%s-redis:6379/0" (include "fleet.fullname" .)) -}}
{{- end -}}
{{- if and (ne .Values.discovery.source "None") (not .Values.routers.settings.discovery) -}}
{{- $_ := set $own "discovery" (include "fleet.core.discovery" . | fromJson) -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .Values.routers.settings) $own | toPrettyJson -}}
{{- end -}}

{{/* The scheme of the routers' port for health and metrics. */}}
{{- define "fleet.healthScheme" -}}
{{- if and .Values.routers.tls.secret .Values.routers.tls.health -}}HTTPS{{- else -}}HTTP{{- end -}}
{{- end -}}

{{/* Where workers are found, as routers are told it. */}}
{{- define "fleet.core.discovery" -}}
{{- $cluster := .Values.discovery.cluster | default .Release.Name -}}
{{- if eq .Values.discovery.source "Kubernetes" -}}
{{- dict "kind" "kubernetes" "cluster" $cluster "namespace" .Release.Namespace | toJson -}}
{{- else -}}
{{- $own := list -}}
{{- if .Values.etcd.install -}}{{- $own = list (printf "%s-etcd:2379" (include "fleet.fullname" .)) -}}{{- end -}}
{{- $endpoints := .Values.etcd.endpoints | default $own -}}
{{- if not $endpoints -}}
{{- fail "etcd.endpoints: names no etcd, and etcd.install is off; discovery.source is Etcd" -}}
{{- end -}}
{{- $told := dict "kind" "etcd" "endpoints" $endpoints "prefix" (printf "/fleet/%s/workers/" $cluster) -}}
{{- if .Values.etcd.tls -}}
{{- if eq .Values.tls.source "None" -}}
{{- fail "etcd.tls: needs a certificate; tls.source is None" -}}
{{- end -}}
{{- $_ := set $told "credentials" (include "fleet.tlsFiles" . | fromJson) -}}
{{- end -}}
{{- toJson $told -}}
{{- end -}}
{{- end -}}

{{- define "fleet.tlsFiles" -}}
{{- dict "certificate" "/etc/fleet/tls/tls.crt" "key" "/etc/fleet/tls/tls.key" "authority" "/etc/fleet/tls/ca.crt" | toJson -}}
{{- end -}}

{{/* What the operator is told. */}}
{{- define "fleet.operatorSettings" -}}
{{- $images := dict "router" (include "fleet.image" (list . .Values.images.router)) -}}
{{- $_ := set $images "worker_cpu" (include "fleet.image" (list . .Values.images.workerCpu)) -}}
{{- $_ := set $images "worker_cuda" (include "fleet.image" (list . .Values.images.workerCuda)) -}}
{{- $_ := set $images "worker_rocm" (include "fleet.image" (list . .Values.images.workerRocm)) -}}
{{- $own := dict "images" $images "listen" "0.0.0.0:8080" "plans_obeyed" .Values.planner.enabled -}}
{{- $_ := set $own "namespaces" (ternary (list .Release.Namespace) list (eq .Values.operator.scope "Namespace")) -}}
{{- $name := printf "%s-operator" (include "fleet.fullname" .) -}}
{{- $_ := set $own "lease" (dict "name" $name "namespace" .Release.Namespace "owner" $name) -}}
{{- if .Values.monitoring.access.tlsSecret }}{{- $_ := set $own "metrics_tls" (dict "certificate" "/etc/fleet/metrics-tls/tls.crt" "key" "/etc/fleet/metrics-tls/tls.key") }}{{ end -}}
{{- if not (dig "metrics_access" dict .Values.operator.settings) }}{{- with include "fleet.metricsReaders" . | fromJson }}{{- $_ := set $own "metrics_access" . }}{{ end }}{{ end -}}
{{- range .Values.operator.secrets -}}
{{- if and (eq .setting "probe.keys") (not (dig "probe" "insecure" false $.Values.operator.settings)) -}}
{{- fail "operator.secrets: probe.keys would cross the network in the clear; set operator.settings.probe.insecure on a network that nobody else is on, or leave the keys out" -}}
{{- end -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .Values.operator.settings) $own | toPrettyJson -}}
{{- end -}}

{{/* Rights of the operator or the planner: (list root component rules). In a namespace by a Role, or everywhere by a ClusterRole. */}}
{{- define "fleet.access" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}{{- $rules := index . 2 -}}
{{- $name := printf "%s-%s" (include "fleet.fullname" $root) $component -}}
{{- $account := include "fleet.serviceAccountName" (list $root (index $root.Values $component).serviceAccount $name) -}}
{{- $cluster := eq $root.Values.operator.scope "Cluster" -}}
{{- $kind := ternary "ClusterRole" "Role" $cluster -}}
{{- $wide := ternary (printf "%s-%s" $root.Release.Namespace $name) $name $cluster -}}
# Where deployments are.
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}
metadata:
  name: {{ $wide }}
  {{- if not $cluster }}
  namespace: {{ $root.Release.Namespace }}
  {{- end }}
  labels: {{- include "fleet.labels" (list $root $component) | nindent 4 }}
rules: {{- toYaml (concat $rules.deployments (ternary ($rules.cluster | default list) list $cluster)) | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
metadata:
  name: {{ $wide }}
  {{- if not $cluster }}
  namespace: {{ $root.Release.Namespace }}
  {{- end }}
  labels: {{- include "fleet.labels" (list $root $component) | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: {{ $kind }}, name: {{ $wide }}}
subjects:
  - {kind: ServiceAccount, name: {{ $account }}, namespace: {{ $root.Release.Namespace }}}
---
# Where it runs itself: who leads is settled there.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}-leader
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "fleet.labels" (list $root $component) | nindent 4 }}
rules: {{- toYaml $rules.own | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}-leader
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "fleet.labels" (list $root $component) | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}-leader}
subjects:
  - {kind: ServiceAccount, name: {{ $account }}, namespace: {{ $root.Release.Namespace }}}
{{- end -}}

{{/* What the planner is told. */}}
{{- define "fleet.plannerSettings" -}}
{{- $own := dict "listen" "0.0.0.0:8080" -}}
{{- $_ := set $own "namespaces" (ternary (list .Release.Namespace) list (eq .Values.operator.scope "Namespace")) -}}
{{- $name := printf "%s-planner" (include "fleet.fullname" .) -}}
{{- $_ := set $own "lease" (dict "name" $name "namespace" .Release.Namespace "owner" $name) -}}
{{- if .Values.planner.controlSecret -}}
{{- $_ := set $own "control_listen" "0.0.0.0:50053" -}}
{{- $_ := set $own "control_credentials" (dict "secret_file" "/etc/fleet/control/secret") -}}
{{- end -}}
{{- if .Values.monitoring.access.tlsSecret }}{{- $_ := set $own "metrics_tls" (dict "certificate" "/etc/fleet/metrics-tls/tls.crt" "key" "/etc/fleet/metrics-tls/tls.key") }}{{ end -}}
{{- if not (dig "metrics_access" dict .Values.planner.settings) }}{{- with include "fleet.metricsReaders" . | fromJson }}{{- $_ := set $own "metrics_access" . }}{{ end }}{{ end -}}
{{- mergeOverwrite (deepCopy .Values.planner.settings) $own | toPrettyJson -}}
{{- end -}}

{{/* Rules of NetworkPolicies for what pods ask: who answers for names, the API server, and pods of Fleet, of this release and of DisaggDeployments. */}}
{{- define "fleet.egressToNames" -}}
- ports:
    {{- range $port := list 53 5353 }}
    - {port: {{ $port }}, protocol: UDP}
    - {port: {{ $port }}, protocol: TCP}
    {{- end }}
  {{- with .Values.networkPolicy.egress.dns }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "fleet.egressToApiServer" -}}
- ports:
    {{- range .Values.networkPolicy.egress.apiServerPorts }}
    - {port: {{ . }}}
    {{- end }}
  {{- with .Values.networkPolicy.egress.apiServer }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "fleet.egressToPods" -}}
- to:
    - podSelector: {matchLabels: {app.kubernetes.io/part-of: fleet}}
    - podSelector: {matchLabels: {app.kubernetes.io/managed-by: fleet-operator}}
      {{- if eq .Values.operator.scope "Cluster" }}
      namespaceSelector: {}
      {{- end }}
{{- end -}}

{{/* Ports of what routers are told to ask, as a JSON list: servers, a KV store, Redis, etcd. */}}
{{- define "fleet.routerTargets" -}}
{{- $settings := include "fleet.routerSettings" . | fromJson -}}
{{- $ports := list -}}
{{- range $settings.openai_workers -}}
{{- $ports = append $ports (include "fleet.portOf" (list .url (ternary "443" "80" (hasPrefix "https://" .url)))) -}}
{{- range $own := list .kv_events .kv_events_replay }}{{ $ports = append $ports (include "fleet.portOf" (list $own "")) }}{{ end -}}
{{- end -}}
{{- range $own := concat (list $settings.store) (dig "discovery" "endpoints" list $settings) -}}
{{- $ports = append $ports (include "fleet.portOf" (list $own "")) -}}
{{- end -}}
{{- $secret := list -}}
{{- range .Values.routers.secrets }}{{ $secret = append $secret .setting }}{{ end -}}
{{- if or $settings.tenants_redis (has "tenants_redis" $secret) -}}
{{- $ports = append $ports (include "fleet.portOf" (list $settings.tenants_redis "6379")) -}}
{{- end -}}
{{- with dig "tracing" "endpoint" "" $settings -}}
{{- $ports = append $ports (include "fleet.portOf" (list . (ternary "443" "80" (hasPrefix "https://" .)))) -}}
{{- end -}}
{{- $found := list -}}
{{- range $ports | uniq | sortAlpha }}{{ if . }}{{ $found = append $found (int .) }}{{ end }}{{ end -}}
{{- toJson $found -}}
{{- end -}}

{{/* Of an address or a URL: (list address default). Empty: it has none, as Unix sockets have not. */}}
{{- define "fleet.portOf" -}}
{{- $address := index . 0 | default "" -}}
{{- if not (or (hasPrefix "unix:" $address) (hasPrefix "ipc:" $address)) -}}
{{- $host := regexReplaceAll "^[a-z0-9+]+://([^/]*).*$" $address "${1}" -}}
{{- regexFind ":[0-9]+$" $host | trimPrefix ":" | default (index . 1) -}}
{{- end -}}
{{- end -}}
