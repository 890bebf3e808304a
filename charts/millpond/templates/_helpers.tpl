{{/* Names and labels. No template outside this file builds a name from the release. */}}

{{- define "millpond.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "millpond.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "millpond.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" (.Release.Name | trunc 24 | trimSuffix "-") $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Cluster-scoped objects carry the namespace, so that releases of one name in two namespaces never meet. */}}
{{- define "millpond.clusterName" -}}
{{- $full := include "millpond.fullname" . -}}
{{- if eq .Release.Namespace (printf "%s-system" $full) -}}
{{- $full -}}
{{- else -}}
{{- printf "%s-%s" $full .Release.Namespace | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "millpond.operatorName" -}}
{{- include "millpond.fullname" . }}-operator
{{- end -}}

{{- define "millpond.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "millpond.operatorName" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The role the operator binds gateways to: cluster-wide one ClusterRole, else a Role in each namespace. */}}
{{- define "millpond.gatewayRoleName" -}}
{{- if eq .Values.scope "Cluster" -}}
{{- include "millpond.clusterName" . }}-gateway
{{- else -}}
{{- include "millpond.fullname" . }}-gateway
{{- end -}}
{{- end -}}

{{- define "millpond.gatewayRoleKind" -}}
{{- ternary "ClusterRole" "Role" (eq .Values.scope "Cluster") -}}
{{- end -}}

{{/* Namespaces that are served, as JSON; empty means all. */}}
{{- define "millpond.namespaces" -}}
{{- if eq .Values.scope "Cluster" -}}
[]
{{- else -}}
{{- default (list .Release.Namespace) .Values.namespaces | uniq | toJson -}}
{{- end -}}
{{- end -}}

{{/* Full reference of one of the three images: (list context "operator"). */}}
{{- define "millpond.image" -}}
{{- $root := index . 0 -}}
{{- $which := index . 1 -}}
{{- $images := $root.Values.images -}}
{{- if index $images $which -}}
{{- index $images $which -}}
{{- else -}}
{{- $prefix := ternary (printf "%s/" (trimSuffix "/" $images.registry)) "" (ne $images.registry "") -}}
{{- printf "%smillpond/%s:%s" $prefix $which (default $root.Chart.AppVersion $images.tag) -}}
{{- end -}}
{{- end -}}

{{- define "millpond.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "millpond.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: millpond
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "millpond.operatorSelector" -}}
app.kubernetes.io/name: {{ include "millpond.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "millpond.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "millpond.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}
