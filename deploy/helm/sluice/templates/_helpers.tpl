{{/* The name of all objects: the release's, with the chart's if it is not in it. */}}
{{- define "sluice.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "sluice.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "sluice.fullname" .) }}
{{- end }}

{{/* Cluster-wide objects of releases of the same name in different namespaces differ. */}}
{{- define "sluice.clusterName" -}}
{{- if eq .Release.Namespace "kube-system" }}
{{- include "sluice.fullname" . }}
{{- else }}
{{- printf "%s-%s" .Release.Namespace (include "sluice.fullname" .) }}
{{- end }}
{{- end }}

{{- define "sluice.selectorLabels" -}}
app.kubernetes.io/name: sluice
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* The labels of a pod; in kube-proxy's place also the one by which monitoring finds kube-proxy. */}}
{{- define "sluice.podLabels" -}}
{{ include "sluice.selectorLabels" . }}
{{- if not .Values.serviceProxyName }}
k8s-app: kube-proxy
{{- end }}
{{- with .Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/*
sluice.ports returns, as JSON, where /healthz and the metrics are served. With
kube-proxy's ConfigMap its configuration decides, as the program follows it and not
the flags; without it, the values.
*/}}
{{- define "sluice.ports" -}}
{{- $v := .Values }}
{{- if $v.kubeProxyConfigMap }}
{{- $config := dict }}
{{- $map := lookup "v1" "ConfigMap" .Release.Namespace $v.kubeProxyConfigMap }}
{{- if $map }}
  {{- $text := get ($map.data | default dict) $v.kubeProxyConfigKey }}
  {{- if not $text }}
    {{- fail (printf "ConfigMap %s in %s has no key %s: see kubeProxyConfigKey" $v.kubeProxyConfigMap .Release.Namespace $v.kubeProxyConfigKey) }}
  {{- end }}
  {{- $config = fromYaml $text }}
  {{- if hasKey $config "Error" }}
    {{- fail (printf "ConfigMap %s: %s: %s" $v.kubeProxyConfigMap $v.kubeProxyConfigKey $config.Error) }}
  {{- end }}
{{- else if not (and $v.healthzPort $v.metricsBindAddress) }}
  {{- fail (printf "ConfigMap %s decides the ports and cannot be read here (helm template, or it does not exist in %s): give healthzPort and metricsBindAddress as its healthzBindAddress and metricsBindAddress have them; kube-proxy's defaults are 10256 and 127.0.0.1:10249" $v.kubeProxyConfigMap .Release.Namespace) }}
{{- end }}
{{- $six := contains ":" (toString ($config.bindAddress | default "")) }}
{{- $health := $config.healthzBindAddress | default "" }}
{{- $metrics := $config.metricsBindAddress | default "" }}
{{- if $map }}
  {{- $healthOf := include "sluice.address" (dict "given" $health "host" (ternary "::" "0.0.0.0" $six) "port" 10256) | fromJson }}
  {{- $metricsOf := include "sluice.address" (dict "given" $metrics "host" (ternary "::1" "127.0.0.1" $six) "port" 10249) | fromJson }}
  {{- if and $v.healthzPort (ne (int $v.healthzPort) (int $healthOf.port)) }}
    {{- fail (printf "healthzPort %d: nothing would serve it, as healthzBindAddress of ConfigMap %s says port %d. Leave healthzPort out, or change the ConfigMap" (int $v.healthzPort) $v.kubeProxyConfigMap (int $healthOf.port)) }}
  {{- end }}
  {{- if $v.metricsBindAddress }}
    {{- $wanted := include "sluice.address" (dict "given" $v.metricsBindAddress "host" "" "port" 10249) | fromJson }}
    {{- if or (ne (int $wanted.port) (int $metricsOf.port)) (ne $wanted.host $metricsOf.host) }}
      {{- fail (printf "metricsBindAddress %s: nothing would serve it, as metricsBindAddress of ConfigMap %s says %s port %d. Leave it out, or change the ConfigMap" $v.metricsBindAddress $v.kubeProxyConfigMap $metricsOf.host (int $metricsOf.port)) }}
    {{- end }}
  {{- end }}
  {{- dict "health" $healthOf "metrics" $metricsOf | toJson }}
{{- else }}
  {{- dict "health" (dict "host" "0.0.0.0" "port" (int $v.healthzPort)) "metrics" (include "sluice.address" (dict "given" $v.metricsBindAddress "host" "" "port" 10249) | fromJson) | toJson }}
{{- end }}
{{- else }}
{{- dict "health" (dict "host" "0.0.0.0" "port" (int ($v.healthzPort | default 10256))) "metrics" (include "sluice.address" (dict "given" ($v.metricsBindAddress | default "") "host" "127.0.0.1" "port" 10249) | fromJson) | toJson }}
{{- end }}
{{- end }}

{{/* sluice.address splits an address with a port, or completes what is missing, as kube-proxy does. */}}
{{- define "sluice.address" -}}
{{- $given := toString .given }}
{{- if not $given }}
{{- dict "host" .host "port" (int .port) | toJson }}
{{- else if regexMatch "^:[0-9]+$" $given }}
{{- dict "host" "0.0.0.0" "port" (int (trimPrefix ":" $given)) | toJson }}
{{- else if regexMatch "^(\\[[0-9a-fA-F:.]+\\]|[0-9.]+):[0-9]+$" $given }}
{{- dict "host" (regexReplaceAll ":[0-9]+$" $given "" | trimPrefix "[" | trimSuffix "]") "port" (int (regexFind "[0-9]+$" $given)) | toJson }}
{{- else }}
{{- dict "host" $given "port" (int .port) | toJson }}
{{- end }}
{{- end }}

{{/* sluice.check fails where a render would give pods that cannot work. */}}
{{- define "sluice.check" -}}
{{- $v := .Values }}
{{- $ports := include "sluice.ports" . | fromJson }}
{{- range $v.extraArgs }}
  {{- $name := regexFind "^--?[a-z0-9_-]+" . | trimPrefix "-" | trimPrefix "-" | replace "_" "-" }}
  {{- $value := get (dict "healthz-bind-address" "healthzPort" "healthz-port" "healthzPort" "metrics-bind-address" "metricsBindAddress" "metrics-port" "metricsBindAddress" "config" "kubeProxyConfigMap" "master" "apiServer" "service-proxy-name" "serviceProxyName") $name }}
  {{- if $value }}
    {{- fail (printf "extraArgs: %s: use the value %s, which other parts of the chart follow" . $value) }}
  {{- end }}
{{- end }}
{{- range $name, $_ := $v.podLabels }}
  {{- if or (has $name (list "app.kubernetes.io/name" "app.kubernetes.io/instance")) (and (eq $name "k8s-app") (not $v.serviceProxyName)) }}
    {{- fail (printf "podLabels: %s: the chart sets this label itself" $name) }}
  {{- end }}
{{- end }}
{{- $none := list "0" "0%" }}
{{- if eq (has (toString $v.maxSurge) $none) (has (toString $v.maxUnavailable) $none) }}
  {{- fail "maxSurge and maxUnavailable: one of them has to be 0, and only one; with maxSurge: 0 an update cuts what is relayed" }}
{{- end }}
{{- if gt (int $ports.metrics.port) 65535 }}
  {{- fail (printf "metricsBindAddress: %d is no port" (int $ports.metrics.port)) }}
{{- end }}
{{- if eq (int $ports.health.port) (int $ports.metrics.port) }}
  {{- fail (printf "port %d is that of /healthz and that of the metrics" (int $ports.health.port)) }}
{{- end }}
{{- if and $v.besideAnotherSluice (or (eq (int $ports.health.port) 10256) (eq (int $ports.metrics.port) 10249)) }}
  {{- fail "besideAnotherSluice: the other release has ports 10256 and 10249; give healthzPort and metricsBindAddress" }}
{{- end }}
{{- if and $v.monitoring.podMonitor.enabled (or (hasPrefix "127." $ports.metrics.host) (eq $ports.metrics.host "::1")) }}
  {{- fail (printf "monitoring.podMonitor: the metrics are served on %s, where Prometheus cannot reach them; set metricsBindAddress, such as 0.0.0.0:10249 (of kube-proxy's ConfigMap, where there is one)" $ports.metrics.host) }}
{{- end }}
{{- end }}

{{/* sluice.probe is an HTTP probe of a page; the kubelet asks the pod's address unless another one is bound. */}}
{{- define "sluice.probe" -}}
httpGet:
  {{- if not (or (eq .health.host "0.0.0.0") (eq .health.host "::")) }}
  host: {{ .health.host | quote }}
  {{- end }}
  path: {{ .path }}
  port: {{ int .health.port }}
{{- with .more }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The container's capabilities, as JSON: the default ones, those that values add, without those
that they drop. */}}
{{- define "sluice.capabilities" -}}
{{- $all := concat (list "BPF" "CHOWN" "NET_ADMIN" "NET_BIND_SERVICE" "NET_RAW" "PERFMON") .Values.capabilities.add | uniq -}}
{{- $kept := list -}}
{{- range $all -}}
{{- if not (has . $.Values.capabilities.drop) -}}
{{- $kept = append $kept . -}}
{{- end -}}
{{- end -}}
{{- $kept | toJson -}}
{{- end -}}
