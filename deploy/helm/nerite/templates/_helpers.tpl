{{- define "nerite.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "nerite.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "nerite.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "nerite.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "nerite.labels" -}}
app.kubernetes.io/name: {{ include "nerite.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Takes a list: the chart's context and the component. */}}
{{- define "nerite.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "nerite.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "nerite.router" -}}{{ include "nerite.fullname" . }}-router{{- end -}}
{{- define "nerite.picker" -}}{{ include "nerite.fullname" . }}-picker{{- end -}}
{{- define "nerite.routerEnabled" -}}{{ if or .Values.router.enabled .Values.tags.loadBalancing }}true{{ end }}{{- end -}}
{{- define "nerite.discovers" -}}{{ if or (include "nerite.routerEnabled" .) .Values.picker.enabled }}true{{ end }}{{- end -}}

{{/* All pools with all their keys, as JSON under the key "pools". */}}
{{- define "nerite.pools" -}}
{{- $values := .Values -}}
{{- $fullname := include "nerite.fullname" . -}}
{{- $autoscaling := deepCopy $values.autoscaling -}}
{{- if $values.tags.autoscaling }}{{ $_ := set $autoscaling "enabled" true }}{{ end -}}
{{- $defaults := dict
  "repository" $values.image.modelRepositoryPath "numGpus" $values.image.numGpus "autoscaling" $autoscaling "toml" $values.poolToml -}}
{{- range $key := list "replicaCount" "serverArgs" "service" "modelVolume" "workload" "leaderWorkerSet" "env" "envFrom" "volumes"
  "volumeMounts" "resources" "sharedMemory" "temporary" "startSeconds" "preStopSeconds" "exitSeconds" "maxUnavailable" "nodeSelector"
  "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" "podAnnotations" "podLabels" -}}
{{- $_ := set $defaults $key (index $values $key) -}}
{{- end -}}
{{- $pools := list -}}
{{- if $values.pools -}}
{{- range $values.pools -}}
{{- $pool := mergeOverwrite (deepCopy $defaults) (dict "toml" "") (deepCopy .) -}}
{{- $pools = append $pools (set $pool "fullname" (printf "%s-%s" $fullname .name)) -}}
{{- end -}}
{{- else -}}
{{- $pools = list (merge (dict "name" "main" "fullname" $fullname) $defaults) -}}
{{- end -}}
{{- dict "pools" $pools | toJson -}}
{{- end -}}

{{/* Seconds that idle HTTP connections stay open after SIGTERM: clients of a Service keep them, and learn of its end by a reply. */}}
{{- define "nerite.keepalive" -}}
{{- min 5 (div (int .) 2) -}}
{{- end -}}

{{/* The command of a server. Takes a list: the chart's context and the pool. */}}
{{- define "nerite.serverCommand" -}}
{{- $pool := index . 1 -}}
{{- $repository := $pool.repository -}}
{{- if (index . 0).Values.image.modelRepositoryServer }}{{ $repository = "/models" }}{{ end -}}
{{- $command := list "nerite" "serve" $repository -}}
{{- $flags := $pool.serverArgs | default list -}}
{{- if $flags -}}
{{- $whole := has (first $flags) (list "tritonserver" "nerite") -}}
{{- if $whole -}}
{{- $command = list -}}
{{- else if regexMatch "--model-(repository|store)\\b" (join " " $flags) -}}
{{- $command = list "tritonserver" -}}
{{- end -}}
{{- end -}}
{{- $own := list "--address=0.0.0.0" (printf "--exit-timeout-secs=%d" (int $pool.exitSeconds)) -}}
{{- if not (regexMatch "--exit-keepalive-secs\\b" (join " " $flags)) -}}
{{- $own = append $own (printf "--exit-keepalive-secs=%s" (include "nerite.keepalive" $pool.exitSeconds)) -}}
{{- end -}}
{{- concat $command $flags $own | toJson -}}
{{- end -}}

{{/* The API of a kind. Takes a list: the chart's context, the API, that of older clusters, and the first version that has the former. */}}
{{- define "nerite.api" -}}
{{- $has := semverCompare (printf ">=%s-0" (index . 3)) (index . 0).Capabilities.KubeVersion.Version -}}
{{- ternary (index . 1) (index . 2) $has -}}
{{- end -}}

{{- define "nerite.podSecurity" -}}
runAsNonRoot: true
{{- if not .Values.tags.openshift }}
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "nerite.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Waits before SIGTERM. Takes a list: the chart's context and the seconds. */}}
{{- define "nerite.preStop" -}}
{{- if semverCompare ">=1.30-0" (index . 0).Capabilities.KubeVersion.Version -}}
sleep:
  seconds: {{ int (index . 1) }}
{{- else -}}
exec:
  command: [sleep, {{ index . 1 | toString | quote }}]
{{- end -}}
{{- end -}}

{{/* The cluster file of router and picker. */}}
{{- define "nerite.clusterFile" -}}
[router]
address = "0.0.0.0"
http-port = 8000
grpc-port = 8001
metrics-port = 8002
exit-timeout = "{{ int .Values.router.exitSeconds }}s"
{{- if not (contains "exit-keepalive" .Values.router.toml) }}
exit-keepalive = "{{ include "nerite.keepalive" .Values.router.exitSeconds }}s"
{{- end }}
{{- if .Values.router.policy }}
policy-file = "policy.toml"
{{- end }}
{{- with .Values.router.toml }}
{{ . | trim }}
{{- end }}
{{- range (include "nerite.pools" . | fromJson).pools }}

[[pool]]
name = {{ .name | quote }}
kubernetes = {{ printf "%s/%s:http" $.Release.Namespace .fullname | quote }}
{{- with .toml }}
{{ . | trim }}
{{- end }}
{{- end }}
{{- with .Values.router.otherPools }}

{{ . | trim }}
{{- end }}
{{ end -}}
