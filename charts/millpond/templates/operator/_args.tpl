{{/* Arguments of millpond-operator, one a line; a test gives them to the program's own parser. */}}
{{- define "millpond.operatorArgs" -}}
{{- range include "millpond.namespaces" . | fromJsonArray }}
- --namespace={{ . }}
{{- end }}
- --engine-image={{ include "millpond.image" (list . "engine") }}
- --gateway-image={{ include "millpond.image" (list . "gateway") }}
{{- with .Values.images.pullPolicy }}
- --image-pull-policy={{ . }}
{{- end }}
{{- range .Values.images.pullSecrets }}
- --image-pull-secret={{ . }}
{{- end }}
- --lease-name={{ include "millpond.operatorName" . }}
- --gateway-role-kind={{ include "millpond.gatewayRoleKind" . }}
- --gateway-role-name={{ include "millpond.gatewayRoleName" . }}
- --gateway-replicas={{ .Values.gateway.replicas }}
- --gateway-cpu={{ .Values.gateway.cpu }}
- --gateway-memory={{ .Values.gateway.memory }}
- --gateway-memory-limit={{ .Values.gateway.memoryLimit }}
- --gateway-grace-seconds={{ .Values.gateway.graceSeconds }}
{{- range .Values.gateway.extraArgs }}
- {{ printf "--gateway-arg=%s" . | quote }}
{{- end }}
{{- range $name, $value := .Values.gateway.env }}
- {{ printf "--gateway-env=%s=%s" $name $value | quote }}
{{- end }}
- --network-policies={{ .Values.networkPolicies.enabled }}
{{- range .Values.networkPolicies.metricsNamespaces }}
- --metrics-namespace={{ . }}
{{- end }}
- --cluster-domain={{ .Values.clusterDomain }}
- --node-cache-path={{ .Values.engine.nodeCachePath }}
{{- range .Values.operator.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}
