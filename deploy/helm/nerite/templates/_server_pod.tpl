{{/* The pod of a server. Takes a list: the chart's context, the pool, its labels, and whether it is a server or a worker. */}}
{{- define "nerite.serverPod" -}}
{{- $ := index . 0 -}}
{{- $pool := index . 1 -}}
{{- $worker := eq (index . 3) "worker" -}}
metadata:
  labels:
    {{- if $worker }}
    {{- index . 2 | replace "component: server" "component: worker" | nindent 4 }}
    {{- else }}
    {{- index . 2 | nindent 4 }}
    {{- end }}
    {{- with $pool.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $pool.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add (int $pool.preStopSeconds) (int $pool.exitSeconds) 10 }}
  securityContext:
    {{- include "nerite.podSecurity" $ | nindent 4 }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
  {{- with index $pool $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with $.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- $check := $pool.leaderWorkerSet.check }}
  {{- if and (eq $pool.workload "LeaderWorkerSet") $check.enabled }}
  initContainers:
    - name: check
      image: {{ $.Values.image.imageName | quote }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      command:
        - nerite
        - doctor
        - --expect-nodes={{ int $pool.leaderWorkerSet.size }}
        - --wait={{ int $check.waitSeconds }}
        {{- if $pool.numGpus }}
        - --expect-gpus={{ int $pool.numGpus }}
        {{- end }}
        {{- if $check.nvlink }}
        - --expect-nvlink
        {{- end }}
        {{- if $check.rdmaPorts }}
        - --expect-rdma={{ int $check.rdmaPorts }}
        {{- end }}
      securityContext:
        {{- include "nerite.containerSecurity" $ | nindent 8 }}
      env:
        - {name: HOME, value: /tmp}
      resources:
        {{- include "nerite.resources" $pool | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
  {{- end }}
  containers:
    - name: {{ ternary "worker" "server" $worker }}
      image: {{ $.Values.image.imageName | quote }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      {{- if $worker }}
      command:
        {{- $pool.leaderWorkerSet.workerCommand | toYaml | nindent 8 }}
      {{- else }}
      command:
        {{- include "nerite.serverCommand" (list $ $pool) | fromJsonArray | toYaml | nindent 8 }}
      ports:
        - {name: http, containerPort: 8000, protocol: TCP}
        - {name: grpc, containerPort: 8001, protocol: TCP}
        - {name: metrics, containerPort: 8002, protocol: TCP}
      startupProbe:
        httpGet: {path: /v2/health/ready, port: http}
        periodSeconds: 2
        failureThreshold: {{ div (add (int $pool.startSeconds) 1) 2 }}
      readinessProbe:
        httpGet: {path: /v2/health/ready, port: http}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /v2/health/live, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      lifecycle:
        preStop:
          {{- include "nerite.preStop" (list $ $pool.preStopSeconds) | nindent 10 }}
      {{- end }}
      securityContext:
        {{- include "nerite.containerSecurity" $ | nindent 8 }}
      env:
        - {name: HOME, value: /tmp}
        {{- with $pool.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $pool.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- include "nerite.resources" $pool | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if $.Values.image.modelRepositoryServer }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- else if $pool.modelVolume }}
        - {name: models, mountPath: {{ $pool.repository }}, readOnly: true}
        {{- end }}
        {{- with $pool.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ $pool.temporary }}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pool.sharedMemory }}}
    {{- if $.Values.image.modelRepositoryServer }}
    - name: models
      nfs:
        server: {{ $.Values.image.modelRepositoryServer }}
        path: {{ $.Values.image.modelRepositoryPath }}
        readOnly: true
    {{- else if $pool.modelVolume }}
    - name: models
      {{- toYaml $pool.modelVolume | nindent 6 }}
    {{- end }}
    {{- with $pool.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Requests and limits of a container of a pool. */}}
{{- define "nerite.resources" -}}
{{- $resources := deepCopy .resources }}
{{- if .numGpus }}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" (int .numGpus)) ($resources.limits | default dict)) }}
{{- end }}
{{- toYaml $resources }}
{{- end -}}
