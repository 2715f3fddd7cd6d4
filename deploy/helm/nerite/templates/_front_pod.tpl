{{/* The pod of router or picker. Takes a list: the chart's context, the component, its values, the command, and the port that is probed. */}}
{{- define "nerite.frontPod" -}}
{{- $ := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index . 2 -}}
{{- $picker := eq $component "picker" -}}
metadata:
  labels:
    {{- include "nerite.selector" (list $ $component) | nindent 4 }}
  annotations:
    checksum/cluster-file: {{ printf "%s%s" (include "nerite.clusterFile" $) $.Values.router.policy | sha256sum }}
spec:
  serviceAccountName: {{ include "nerite.router" $ }}
  terminationGracePeriodSeconds: {{ add (int $.Values.preStopSeconds) (int $.Values.router.exitSeconds) 10 }}
  securityContext:
    {{- include "nerite.podSecurity" $ | nindent 4 }}
  {{- with $.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ $component }}
      image: {{ $.Values.image.imageName | quote }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      {{- if $picker }}
      command: [nerite, pick, /etc/nerite/cluster.toml, --address, 0.0.0.0, --port, "9002", --metrics-port, "8002"]
      ports:
        - {name: ext-proc, containerPort: 9002, protocol: TCP}
        - {name: metrics, containerPort: 8002, protocol: TCP}
      startupProbe:
        tcpSocket: {port: ext-proc}
        periodSeconds: 2
        failureThreshold: 30
      readinessProbe:
        grpc: {port: 9002, service: readiness}
        periodSeconds: 2
      livenessProbe:
        grpc: {port: 9002, service: liveness}
        periodSeconds: 10
        timeoutSeconds: 5
      {{- else }}
      command: [nerite, route, /etc/nerite/cluster.toml]
      ports:
        - {name: http, containerPort: 8000, protocol: TCP}
        - {name: grpc, containerPort: 8001, protocol: TCP}
        - {name: metrics, containerPort: 8002, protocol: TCP}
      startupProbe:
        httpGet: {path: /v2/health/live, port: http}
        periodSeconds: 2
        failureThreshold: 30
      readinessProbe:
        httpGet: {path: /v2/health/ready, port: http}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /v2/health/live, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
      {{- end }}
      lifecycle:
        preStop:
          {{- include "nerite.preStop" (list $ $.Values.preStopSeconds) | nindent 10 }}
      securityContext:
        {{- include "nerite.containerSecurity" $ | nindent 8 }}
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: cluster, mountPath: /etc/nerite, readOnly: true}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 64Mi}
    - name: cluster
      configMap: {name: {{ include "nerite.router" $ }}}
{{- end -}}
